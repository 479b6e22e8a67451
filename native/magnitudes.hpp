// How large the values of a tensor are (engine/quantize/magnitude.py says what for).
#pragma once

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

// Of a tensor, given row by row. None if its values are all the same or not finite, or if their squares could overflow
// or vanish. values: not empty.
std::optional<Magnitude> tensor_magnitude(std::span<const float> values, std::size_t rows);

}  // namespace dynaquant
