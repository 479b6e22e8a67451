// Values in units of the root of a second moment, and back. Roots, products and quotients are correctly rounded, so results
// are the same on every machine.
#pragma once

#include <cstdint>
#include <span>

namespace dynaquant {

// Sets out[i] to values[i] / sqrt(seconds[i]), or to zero where seconds[i] is zero.
void divide_by_roots(std::span<const float> values, std::span<const float> seconds, std::span<float> out);

// Multiplies values[i] by sqrt(seconds[i]).
void multiply_by_roots(std::span<float> values, std::span<const float> seconds);

// The same for a matrix of rows.size() rows, whose second moments are rows[i] * columns[j].
void divide_by_roots(std::span<const float> values, std::span<const float> rows, std::span<const float> columns,
                     std::span<float> out);
void multiply_by_roots(std::span<float> values, std::span<const float> rows, std::span<const float> columns);

// The same for second moments that are levels: that of values[i] is table[levels[i]]. Throws std::invalid_argument if a level
// is outside the table.
void multiply_by_level_roots(std::span<float> values, std::span<const std::uint8_t> levels, std::span<const float> table);

// Does what grid_levels does for the values that divide_by_roots returns, without a seed. Keeps none of these.
std::uint32_t grid_levels_of_units(std::span<const float> values, std::span<const float> seconds, float inverse,
                                   std::span<std::uint8_t> levels);
std::uint32_t grid_levels_of_units(std::span<const float> values, std::span<const float> rows,
                                   std::span<const float> columns, float inverse, std::span<std::uint8_t> levels);
std::uint32_t grid_levels_of_level_units(std::span<const float> values, std::span<const std::uint8_t> seconds,
                                         std::span<const float> table, float inverse, std::span<std::uint8_t> levels);

}  // namespace dynaquant
