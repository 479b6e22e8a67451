// Values to levels of a uniform grid.
#include "grid.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "parallel.hpp"
#include "tables.hpp"

namespace dynaquant {
namespace {

constexpr std::size_t block_size = std::size_t{1} << 16;
constexpr std::int32_t highest_level = 255;
constexpr float beyond = 200.0f;  // steps; as good as infinitely many, and no trouble for what follows

// Adding and taking away 1.5 · 2^23 leaves no room for bits below 1: rounds to the nearest integer, ties to even, and
// compilers make vector instructions of it on every processor.
float nearest(float x) {
    constexpr float large = 12582912.0f;
    return (x + large) - large;
}

// The finalizer of MurmurHash3, from an index and a seed to [0, 1).
float uniform(std::uint32_t index, std::uint32_t seed) {
    std::uint32_t h = index * 0x9e3779b1u ^ seed;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    h ^= h >> 16;
    return static_cast<float>(h >> 8) * 0x1p-24f;
}

// Quantizes a block and returns its highest level, 256 or more where a value is protected.
template <bool Dithered>
std::int32_t quantize_block(std::span<const float> values, float inverse, std::uint32_t seed, std::size_t begin,
                            std::uint8_t* levels) {
    std::int32_t highest = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        const float steps = std::clamp(values[i] * inverse, -beyond, beyond);
        float rounded = nearest(steps);
        if constexpr (Dithered) {
            const float below = rounded > steps ? rounded - 1.0f : rounded;
            rounded = below + (uniform(static_cast<std::uint32_t>(begin + i), seed) < steps - below ? 1.0f : 0.0f);
        }
        const auto multiple = static_cast<std::int32_t>(rounded);
        const std::int32_t level = multiple > 0 ? 2 * multiple : multiple < 0 ? 1 - 2 * multiple : 0;
        highest = std::max(highest, level);
        levels[i] = static_cast<std::uint8_t>(level > highest_level ? level_protected : level);
    }
    return highest;
}

}  // namespace

std::uint32_t grid_levels(std::span<const float> values, float inverse, std::optional<std::uint32_t> seed,
                          std::span<std::uint8_t> levels) {
    const std::size_t blocks = block_count(values.size(), block_size);
    std::vector<std::int32_t> highest(blocks);
    parallel_for(blocks, [&](std::size_t b) {
        const std::size_t begin = b * block_size;
        const auto block = values.subspan(begin, std::min(block_size, values.size() - begin));
        std::uint8_t* const out = levels.data() + begin;
        highest[b] = seed ? quantize_block<true>(block, inverse, *seed, begin, out)
                          : quantize_block<false>(block, inverse, 0, begin, out);
    });
    const std::int32_t top = highest.empty() ? 0 : *std::max_element(highest.begin(), highest.end());
    return static_cast<std::uint32_t>(std::min(top, highest_level + 1));
}

}  // namespace dynaquant
