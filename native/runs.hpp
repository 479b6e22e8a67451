// Run lengths as symbols: short runs directly, longer runs as a class and extra bits (docs/format.md, "Runs").
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace dynaquant {

// A run has 2 to 2^16 values (a block). The classes 0 to 33 cover these lengths.
inline constexpr std::size_t run_classes = 34;

struct RunCode {
    std::uint32_t run_class;
    std::uint32_t extra;
    unsigned extra_bits;
};

inline unsigned run_extra_bits(std::size_t run_class) {
    return run_class < 8 ? 0 : static_cast<unsigned>(2 + (run_class - 8) / 2);
}

inline RunCode code_of_run(std::size_t length) {
    const auto v = static_cast<std::uint32_t>(length - 2);
    if (v < 8) return {v, 0, 0};
    const auto exponent = static_cast<unsigned>(std::bit_width(v) - 1);
    const std::uint32_t half = (v >> (exponent - 1)) & 1u;
    return {8 + 2 * (exponent - 3) + half, v & ((1u << (exponent - 1)) - 1), exponent - 1};
}

inline std::size_t length_of_run(std::size_t run_class, std::uint32_t extra) {
    if (run_class < 8) return run_class + 2;
    const std::size_t half = (run_class - 8) % 2;
    return ((2 + half) << run_extra_bits(run_class)) + extra + 2;
}

}  // namespace dynaquant
