// How large the values of a tensor are.
#include "magnitudes.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
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

// Returns the size of most values that are not zero; 0 if all are.
double typical_size(std::span<const float> values) {
    std::size_t pace = std::max<std::size_t>(values.size() / typical_sample, 1);
    if (pace > 1 && pace % 2 == 0) --pace;  // rows often have an even length: an even pace would stay in some columns
    double sum = 0.0;
    std::size_t count = 0;
    for (std::size_t i = 0; i < values.size(); i += pace) {
        if (values[i] == 0.0f) continue;
        sum += std::sqrt(std::sqrt(std::abs(static_cast<double>(values[i]))));
        ++count;
    }
    return count == 0 ? 0.0 : std::pow(sum / static_cast<double>(count), 4);
}

}  // namespace

Magnitude matrix_magnitude(std::span<const double> row_sums, std::span<const double> column_sums) {
    std::array<double, 2> smallest, middles, means;
    const std::array axes{row_sums, column_sums};
    for (std::size_t axis = 0; axis < 2; ++axis) {
        const auto length = static_cast<double>(axes[1 - axis].size());
        std::vector<double> squares, present;
        for (const double sum : axes[axis]) {
            squares.push_back(sum / length);
            if (sum > 0.0) present.push_back(sum / length);
        }
        middles[axis] = quantile(present, 0.5);
        smallest[axis] = quantile(present, small_rows);
        means[axis] = limited_mean(squares, largest_share * largest_share * middles[axis]);
    }
    const double small = std::max(std::sqrt(std::min(smallest[0], smallest[1])),
                                  smallest_share * std::sqrt(std::min(middles[0], middles[1])));
    return {std::min(means[0], means[1]), small};
}

Magnitude vector_magnitude(std::span<const double> values) { return magnitude_of(values); }

std::optional<Magnitude> tensor_magnitude(std::span<const float> values, std::size_t rows) {
    const Extremes found = extremes(values);
    const float largest = std::max(found.highest, -found.lowest);
    if (!(found.lowest < found.highest && largest > smallest_safe && largest < largest_safe)) return std::nullopt;
    const std::size_t columns = values.size() / rows;
    if (rows == 1 || columns == 1) return magnitude_of(values);
    std::vector<double> row_sums(rows), column_sums(columns);
    row_and_column_squares(values, row_sums, column_sums);
    const Magnitude magnitude = matrix_magnitude(row_sums, column_sums);
    if (magnitude.small > most_uneven * typical_size(values)) return std::nullopt;
    return magnitude;
}

}  // namespace dynaquant
