// Sums of many floats in double precision, and their extremes. The order of additions does not depend on the processor
// or the number of threads, so that decisions based on a sum are the same everywhere.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace dynaquant {

struct Sums {
    double values = 0.0;
    double squares = 0.0;
};

Sums sums(std::span<const float> values);

// Squares of exact values, and of the differences (in single precision) of other values from them.
struct Errors {
    double squares = 0.0;
    double errors = 0.0;
};

// Adds up Errors in 16 independent sums: enough for compilers to vectorise.
struct ErrorSums {
    static constexpr std::size_t lanes = 16;
    std::array<double, lanes> squares{}, errors{};

    // exact: as many as values. The first value of each call belongs to the first sum.
    [[gnu::always_inline]] void add(std::span<const float> values, const float* exact) {
        const auto add_one = [&](std::size_t i, std::size_t lane) {
            const double wanted = exact[i], error = values[i] - exact[i];
            squares[lane] += wanted * wanted;
            errors[lane] += error * error;
        };
        const std::size_t whole = values.size() / lanes * lanes;
        for (std::size_t i = 0; i < whole; i += lanes)
            for (std::size_t lane = 0; lane < lanes; ++lane) add_one(i + lane, lane);
        for (std::size_t i = whole; i < values.size(); ++i) add_one(i, i - whole);
    }

    [[gnu::always_inline]] Errors total() const {
        Errors found;
        for (std::size_t lane = 0; lane < lanes; ++lane) found.squares += squares[lane], found.errors += errors[lane];
        return found;
    }
};

// exact: as many as values.
Errors errors(std::span<const float> values, std::span<const float> exact);

struct Extremes {
    float lowest, highest;
};

// Returns the lowest and the highest value; NaN twice if any value is NaN. Throws std::invalid_argument if there are no
// values.
Extremes extremes(std::span<const float> values);

// Extremes, and the smallest of the values that are at least a limit; infinity if there is none.
struct ExtremesFrom : Extremes {
    float smallest;
};

// Returns the same in one pass. limit: above zero.
ExtremesFrom extremes_from(std::span<const float> values, float limit);

// Fills the sums of a matrix. values: row by row, row_sums.size() rows of column_sums.size() columns.
void row_and_column_sums(std::span<const float> values, std::span<double> row_sums, std::span<double> column_sums);

// The same of the squares of the values, which are computed in single precision. Returns the extremes of the values, found in
// the same pass.
Extremes row_and_column_squares(std::span<const float> values, std::span<double> row_sums, std::span<double> column_sums);

}  // namespace dynaquant
