// The ladder on which the steps of grids and the values of logarithmic grids lie (docs/format.md): rung k is 2^(k/4).
#pragma once

#include <array>
#include <cmath>

namespace dynaquant {

constexpr int rungs_per_octave = 4;
constexpr int lowest_rung = -126 * rungs_per_octave, highest_rung = 127 * rungs_per_octave;
constexpr int highest_step_rung = highest_rung - 8 * rungs_per_octave;  // 127 such steps are a finite float

// The same on every machine, and the same as rung_value in Python.
inline float rung_value(int rung) {
    constexpr std::array<float, rungs_per_octave> roots{1.0f, 1.189207115002721f, 1.4142135623730951f,
                                                        1.681792830507429f};
    const int octave = (rung - (rung < 0 ? rungs_per_octave - 1 : 0)) / rungs_per_octave;
    return static_cast<float>(
        std::ldexp(static_cast<double>(roots[static_cast<std::size_t>(rung - octave * rungs_per_octave)]), octave));
}

}  // namespace dynaquant
