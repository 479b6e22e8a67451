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

// Of a matrix: whether it is too uneven for a grid, as one with a mask of -10000 among trained values. counts: of a sample, by
// the exponent bits of its values as float32. Throws std::invalid_argument if there is not one for each exponent, or if all
// sums are zero. In the signs of it, "small" is the root mean square of the smallest rows or columns, but for small_rows:
// - small is more than most_uneven times the typical size: the fourth power of the mean of the fourth roots of all values but
//   zeros, which a few values of any size hardly move. So a grid would leave nothing of most values;
// - there are two groups of values, widest_gap octaves without any between the two. The lower one has lower_share of the
//   values, the upper one upper_share. The upper one spans two octaves at most: trained values would come close to zero;
// - there are such groups, small belongs to the upper one, and the lower one has lower_share without the values in rows and
//   columns that have no others. So a grid would leave nothing of the lower one.
bool is_uneven(std::span<const double> counts, std::span<const double> row_sums, std::span<const double> column_sums);
inline constexpr std::size_t exponents = 256;
inline constexpr double most_uneven = 8.0, lower_share = 0.1, upper_share = 0.02;
inline constexpr std::size_t widest_gap = 8;
// The sample has every so many values of a matrix with so many values: about uneven_sample.
std::size_t uneven_pace(std::size_t size);
inline constexpr std::size_t uneven_sample = 1024;

// Of a tensor, given row by row. None if its values are all the same or not finite, if their squares could overflow or
// vanish, or if it is a matrix of values too uneven for a grid. values: not empty.
std::optional<Magnitude> tensor_magnitude(std::span<const float> values, std::size_t rows);

}  // namespace dynaquant
