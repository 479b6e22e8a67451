// Sums of many floats in double precision. Every sum is taken in one order, whatever the processor or the number of
// threads, so that what is decided by it is decided the same everywhere.
#pragma once

#include <cstddef>
#include <span>

namespace dynaquant {

struct Sums {
    double values = 0.0;
    double squares = 0.0;
};

Sums sums(std::span<const float> values);

// values: a matrix, row by row, of row_sums.size() rows and column_sums.size() columns.
void row_and_column_sums(std::span<const float> values, std::span<double> row_sums, std::span<double> column_sums);

}  // namespace dynaquant
