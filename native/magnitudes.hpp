// How large the values of a tensor are (engine/quantize/magnitude.py says what for).
#pragma once

#include <cstddef>
#include <optional>
#include <span>

namespace dynaquant {

// mean_square: of all values, but of outliers only as much as largest_share lets through. small: the root mean square of
// the smallest rows or columns, but for small_rows of them; of a vector, the standard deviation.
struct Magnitude {
    double mean_square, small;
};

// The share of rows, and of columns, that may have smaller values than Magnitude::small.
inline constexpr double small_rows = 0.1;
// Magnitude::small is at least this share of the root mean square of the row in the middle: rows that are all but zero do
// not matter more than that.
inline constexpr double smallest_share = 1.0 / 8;
// Rows count with at most this multiple of the middle row's root mean square.
inline constexpr double largest_share = 4.0;

// Of a matrix, from the sums of squares of its rows and its columns. Throws std::invalid_argument if all are zero.
Magnitude matrix_magnitude(std::span<const double> row_sums, std::span<const double> column_sums);

// Of a vector. Throws std::invalid_argument if its values are all the same.
Magnitude vector_magnitude(std::span<const double> values);

// A matrix is too uneven for a grid if Magnitude::small is more than this multiple of its typical size: every row and every
// column has values so large that a grid for them would leave nothing of most others. The typical size is that of values
// that are not zero: the fourth power of the mean of their fourth roots, which a few values of any size hardly move.
inline constexpr double most_uneven = 8.0;
// At most about so many values tell the typical size.
inline constexpr std::size_t typical_sample = 1024;

// Of a tensor, given row by row. None if its values are all the same or not finite, if their squares could overflow or
// vanish, or if it is a matrix of values too uneven for a grid. values: not empty.
std::optional<Magnitude> tensor_magnitude(std::span<const float> values, std::size_t rows);

}  // namespace dynaquant
