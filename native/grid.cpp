// Values to levels of a uniform grid.
#include "grid.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "parallel.hpp"
#include "tables.hpp"

namespace dynaquant {
namespace {

constexpr std::size_t block_size = std::size_t{1} << 16;
constexpr float farthest = 127.0f;
constexpr float beyond = 200.0f;

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

std::uint8_t level_of(float rounded) {
    const auto steps = static_cast<std::int32_t>(rounded);
    const std::int32_t level = steps > 0 ? 2 * steps : steps < 0 ? 1 - 2 * steps : 0;
    return static_cast<std::uint8_t>(steps > 127 || steps < -127 ? level_protected : level);
}

}  // namespace

std::uint32_t grid_levels(std::span<const float> values, float inverse, std::optional<std::uint32_t> seed,
                          std::span<std::uint8_t> levels) {
    std::atomic<std::uint32_t> highest{0};
    std::atomic<bool> any_protected{false};
    parallel_for(block_count(values.size(), block_size), [&](std::size_t b) {
        const std::size_t begin = b * block_size;
        const std::size_t end = std::min(begin + block_size, values.size());
        std::uint8_t top = 0;
        float largest = 0.0f;
        for (std::size_t i = begin; i < end; ++i) {
            const float steps = std::clamp(values[i] * inverse, -beyond, beyond);
            // Shifting by a fraction from [-1/2, 1/2) and rounding goes up as often as the value is near to the next.
            const float shift = seed ? uniform(static_cast<std::uint32_t>(i), *seed) - 0.5f : 0.0f;
            const float rounded = nearest(steps + shift);
            levels[i] = level_of(rounded);
            top = std::max(top, levels[i]);
            largest = std::max(largest, rounded < 0 ? -rounded : rounded);
        }
        std::uint32_t seen = highest.load();
        while (seen < top && !highest.compare_exchange_weak(seen, top)) {
        }
        if (largest > farthest) any_protected.store(true);
    });
    return any_protected ? 256 : highest.load();
}

}  // namespace dynaquant
