// How large the values of a tensor are.
#include "magnitudes.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "sums.hpp"

namespace dynaquant {
namespace {

constexpr double normal_median = 0.6745;  // median magnitude of normally distributed values, in standard deviations
constexpr float smallest_safe = 1e-12f, largest_safe = 1e15f;

// Returns the quantile of values, between two of them by linear interpolation. Reorders them.
double quantile(std::vector<double>& values, double share) {
    if (values.empty()) throw std::invalid_argument("all values are the same");
    const double place = share * static_cast<double>(values.size() - 1);
    const auto below = static_cast<std::ptrdiff_t>(place);
    const auto at = values.begin() + below;
    std::nth_element(values.begin(), at, values.end());
    const double low = *at;
    const double high = at + 1 == values.end() ? low : *std::min_element(at + 1, values.end());
    return low + (high - low) * (place - static_cast<double>(below));
}

// Returns the mean of values of which none counts more than a limit.
double limited_mean(std::span<const double> values, double limit) {
    double sum = 0.0;
    for (const double value : values) sum += std::min(value, limit);
    return sum / static_cast<double>(values.size());
}

// Needs memory for a copy in double precision.
template <typename Value>
Magnitude magnitude_of(std::span<const Value> values) {
    std::vector<double> buffer(values.begin(), values.end());
    const double middle = quantile(buffer, 0.5);
    const auto median_of_positive = [&](const auto& of) {
        buffer.clear();
        for (const double value : values)
            if (const double found = of(value); found > 0.0) buffer.push_back(found);
        return quantile(buffer, 0.5) / normal_median;
    };
    const double deviation = median_of_positive([&](double value) { return std::abs(value - middle); });
    const double limit = largest_share * median_of_positive([](double value) { return std::abs(value); });
    double sum = 0.0;
    for (const double value : values) {
        const double size = std::min(std::abs(value), limit);
        sum += size * size;
    }
    return {sum / static_cast<double>(values.size()), deviation};
}

// Returns the mean squares of the rows that are not zero. sums: of their squares.
std::vector<double> mean_squares(std::span<const double> sums, std::size_t length) {
    std::vector<double> found;
    for (const double sum : sums)
        if (sum > 0.0) found.push_back(sum / static_cast<double>(length));
    return found;
}

// Returns the share of mean squares whose root is at most a limit.
double share_within(const std::vector<double>& squares, double limit) {
    const auto within = [&](double square) { return square <= limit * limit; };
    return static_cast<double>(std::count_if(squares.begin(), squares.end(), within)) / static_cast<double>(squares.size());
}

// Returns how many values of a sample have each exponent.
std::array<double, exponents> count_exponents(std::span<const float> values) {
    const std::size_t pace = uneven_pace(values.size());
    std::array<double, exponents> counts{};
    for (std::size_t i = 0; i < values.size(); i += pace) counts[std::bit_cast<std::uint32_t>(values[i]) >> 23 & 0xFF] += 1.0;
    return counts;
}

}  // namespace

Magnitude matrix_magnitude(std::span<const double> row_sums, std::span<const double> column_sums) {
    std::array<double, 2> smallest, middles, means;
    const std::array axes{row_sums, column_sums};
    for (std::size_t axis = 0; axis < 2; ++axis) {
        const auto length = static_cast<double>(axes[1 - axis].size());
        std::vector<double> squares, present = mean_squares(axes[axis], axes[1 - axis].size());
        for (const double sum : axes[axis]) squares.push_back(sum / length);
        middles[axis] = quantile(present, 0.5);
        smallest[axis] = quantile(present, small_rows);
        means[axis] = limited_mean(squares, largest_share * largest_share * middles[axis]);
    }
    const double small = std::max(std::sqrt(std::min(smallest[0], smallest[1])),
                                  smallest_share * std::sqrt(std::min(middles[0], middles[1])));
    return {std::min(means[0], means[1]), small};
}

std::size_t uneven_pace(std::size_t size) {
    const std::size_t pace = std::max<std::size_t>(size / uneven_sample, 1);
    return pace > 1 && pace % 2 == 0 ? pace - 1 : pace;  // rows often have an even length: it would stay in some columns
}

bool is_uneven(std::span<const double> counts, std::span<const double> row_sums, std::span<const double> column_sums) {
    if (counts.size() != exponents) throw std::invalid_argument("there must be a count for each exponent");
    std::vector<double> rows = mean_squares(row_sums, column_sums.size());
    std::vector<double> columns = mean_squares(column_sums, row_sums.size());
    // Not Magnitude::small, which leaves out rows that are all but zero.
    const double small = std::sqrt(std::min(quantile(rows, small_rows), quantile(columns, small_rows)));
    const auto power = [](std::size_t exponent) { return std::exp2(static_cast<double>(exponent) - 127.0); };
    double number = 0.0, roots = 0.0;
    for (std::size_t e = 1; e < exponents; ++e) {  // zeros have the exponent 0
        if (counts[e] == 0.0) continue;
        number += counts[e];
        roots += counts[e] * std::exp2((static_cast<double>(e) - 127.0) / 4.0);
    }
    if (small > most_uneven * std::pow(roots / std::max(number, 1.0), 4)) return true;
    double lower = 0.0;
    for (std::size_t e = 1, empty = 0; e < exponents; ++e) {
        if (counts[e] == 0.0) {
            ++empty;
            continue;
        }
        const double upper = number - lower;
        if (empty >= widest_gap && lower > 0.0 && upper >= upper_share * number) {
            if (lower >= lower_share * number && counts[e] + (e + 1 < exponents ? counts[e + 1] : 0.0) == upper) return true;
            const double top = power(e - empty);  // of the lower group
            const double alone = 1.0 - (1.0 - share_within(rows, top)) * (1.0 - share_within(columns, top));
            if (small > most_uneven * top && lower >= (lower_share + alone) * number) return true;
        }
        lower += counts[e];
        empty = 0;
    }
    return false;
}

Magnitude vector_magnitude(std::span<const double> values) { return magnitude_of(values); }

std::optional<Magnitude> tensor_magnitude(std::span<const float> values, std::size_t rows) {
    const std::size_t columns = values.size() / rows;
    const bool is_vector = rows == 1 || columns == 1;
    std::vector<double> row_sums(is_vector ? 0 : rows), column_sums(is_vector ? 0 : columns);
    const Extremes found = is_vector ? extremes(values) : row_and_column_squares(values, row_sums, column_sums);
    const float largest = std::max(found.highest, -found.lowest);
    if (!(found.lowest < found.highest && largest > smallest_safe && largest < largest_safe)) return std::nullopt;
    if (is_vector) return magnitude_of(values);
    const Magnitude magnitude = matrix_magnitude(row_sums, column_sums);
    if (is_uneven(count_exponents(values), row_sums, column_sums)) return std::nullopt;
    return magnitude;
}

}  // namespace dynaquant
