// Values to levels of a uniform grid.
#include "grid.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "cpu.hpp"
#include "parallel.hpp"
#include "tables.hpp"

namespace dynaquant {
namespace {

constexpr std::size_t block_size = std::size_t{1} << 16;
constexpr std::int32_t highest_level = 255;
// In grid steps. Values farther from zero count as this far: they are protected, and nothing overflows.
constexpr float beyond = 200.0f;

// Rounds to the nearest integer, ties to even: adding and subtracting 1.5 · 2^23 drops all bits below 1. Unlike library
// functions, compilers can vectorise this for every processor.
float nearest(float x) {
    constexpr float large = 12582912.0f;
    return (x + large) - large;
}

// Returns a random number in [0, 1) from an index and a seed, by the finalizer of MurmurHash3.
float uniform(std::uint32_t index, std::uint32_t seed) {
    std::uint32_t h = index * 0x9e3779b1u ^ seed;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    h ^= h >> 16;
    return static_cast<float>(h >> 8) * 0x1p-24f;
}

// Quantizes a block and returns its highest level: 256 or more if a value is protected.
template <bool Stochastic>
[[gnu::always_inline]] inline std::int32_t quantize(std::span<const float> values, float inverse, std::uint32_t seed,
                                                    std::size_t begin, std::uint8_t* levels) {
    // Works in pieces of three loops, each over values of one size, so that compilers vectorise them.
    std::int32_t highest = 0;
    std::array<std::int32_t, 512> piece;
    for (std::size_t done = 0; done < values.size(); done += piece.size()) {
        const std::size_t count = std::min(piece.size(), values.size() - done);
        for (std::size_t i = 0; i < count; ++i) {
            float steps = values[done + i] * inverse;
            steps = steps < -beyond ? -beyond : steps;
            steps = steps > beyond ? beyond : steps;
            float rounded = nearest(steps);
            if constexpr (Stochastic) {
                const float below = rounded > steps ? rounded - 1.0f : rounded;
                const bool up = uniform(static_cast<std::uint32_t>(begin + done + i), seed) < steps - below;
                rounded = up ? below + 1.0f : below;
            }
            const auto multiple = static_cast<std::int32_t>(rounded);
            const std::int32_t sign = multiple >> 31;
            piece[i] = 2 * ((multiple ^ sign) - sign) - sign;  // 2 · |multiple|, plus 1 if it is negative
        }
        for (std::size_t i = 0; i < count; ++i) highest = std::max(highest, piece[i]);
        for (std::size_t i = 0; i < count; ++i)
            levels[done + i] = static_cast<std::uint8_t>(piece[i] > highest_level ? level_protected : piece[i]);
    }
    return highest;
}

template <bool Stochastic>
std::int32_t quantize_plain(std::span<const float> values, float inverse, std::uint32_t seed, std::size_t begin,
                            std::uint8_t* levels) {
    return quantize<Stochastic>(values, inverse, seed, begin, levels);
}

template <bool Stochastic>
DYNAQUANT_AVX2 std::int32_t quantize_avx2(std::span<const float> values, float inverse, std::uint32_t seed,
                                          std::size_t begin, std::uint8_t* levels) {
    return quantize<Stochastic>(values, inverse, seed, begin, levels);
}

template <bool Stochastic>
auto quantize_block() {
    return has_avx2() ? quantize_avx2<Stochastic> : quantize_plain<Stochastic>;
}

}  // namespace

std::uint32_t grid_levels(std::span<const float> values, float inverse, std::optional<std::uint32_t> seed,
                          std::span<std::uint8_t> levels) {
    const std::size_t blocks = block_count(values.size(), block_size);
    std::vector<std::int32_t> highest(blocks);
    const auto quantize_values = seed ? quantize_block<true>() : quantize_block<false>();
    parallel_for(blocks, [&](std::size_t b) {
        const std::size_t begin = b * block_size;
        const auto block = values.subspan(begin, std::min(block_size, values.size() - begin));
        highest[b] = quantize_values(block, inverse, seed.value_or(0), begin, levels.data() + begin);
    });
    const std::int32_t top = highest.empty() ? 0 : *std::max_element(highest.begin(), highest.end());
    return static_cast<std::uint32_t>(std::min(top, highest_level + 1));
}

}  // namespace dynaquant
