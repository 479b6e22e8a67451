// Values to levels of a uniform grid (docs/format.md, "Levels"). Zero is the level pruned; bins are +1, -1, +2, -2, …
// steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "sums.hpp"

namespace dynaquant {

// Rounds every value to a multiple of the step and sets levels[i] to its level, or to protected beyond 127 steps from
// zero. values: finite. inverse: 1 / step. seed: without one, rounds to the nearest multiple, ties to even. With a
// seed, rounds stochastically: the probability of the multiple above is the distance from the multiple below, in steps;
// the random number is a hash of seed and first + i. first: the index of values[0] in the tensor. Returns the highest
// level, or 256 if a value is protected.
std::uint32_t grid_levels(std::span<const float> values, float inverse, std::optional<std::uint32_t> seed,
                          std::size_t first, std::span<std::uint8_t> levels);

// Sets out[i] to the value that the level of values[i] is restored to: a multiple of the step, or values[i] in 16 bits
// (bfloat16) if it is protected. The levels are those of grid_levels, without making them. first: the index of
// values[0] in the tensor, for stochastic rounding.
void grid_values(std::span<const float> values, float inverse, float step, std::optional<std::uint32_t> seed,
                 std::size_t first, std::span<float> out);

// Sums over the values of a tensor, and what grid_levels returns; 0 if no levels were made.
struct GridErrors : Errors {
    std::uint32_t highest = 0;
};

// Returns the squares of the values, and of the differences (in single precision) of what grid_values returns from
// them. Makes the levels of grid_levels in the same pass, unless levels is empty.
GridErrors grid_errors(std::span<const float> values, float inverse, float step, std::optional<std::uint32_t> seed,
                       std::size_t first, std::span<std::uint8_t> levels);

// How a grid rounds a sample, in units of its step and apart from the values that it protects. r is the multiple that a
// value is rounded to, or the protected value.
struct GridFit {
    double product = 0.0, square = 0.0;                      // Σ r · products, Σ r² · squares
    double protected_product = 0.0, protected_square = 0.0;  // the same sums of the protected values
};

// Sets fits[k] for the grid with step 1 / inverses[k]. products, squares: as many as values. Sums are the same on every
// machine.
void grid_fits(std::span<const float> values, std::span<const double> products, std::span<const double> squares,
               std::span<const float> inverses, std::span<GridFit> fits);

}  // namespace dynaquant
