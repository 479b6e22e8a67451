// Values to levels of a uniform grid (docs/format.md, "Levels"): zero is pruned, +1, -1, +2, -2, … steps follow.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace dynaquant {

// levels[i] = the level of the multiple of the step that is nearest to values[i], ties to even; protected where that is
// further than 127 steps from zero. inverse: 1 / step. seed: rounds up with the probability of how far a value has come
// from the multiple below it to that above, by a hash of seed and i. Returns the highest level, or 256 where a value is
// protected. values are finite.
std::uint32_t grid_levels(std::span<const float> values, float inverse, std::optional<std::uint32_t> seed,
                          std::span<std::uint8_t> levels);

}  // namespace dynaquant
