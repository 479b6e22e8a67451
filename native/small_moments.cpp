// Moments of small tensors that one process holds as a whole, each in one call.
#include "small_moments.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "grid.hpp"
#include "rungs.hpp"
#include "sums.hpp"

namespace dynaquant {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

std::vector<float> decoded(const Powers& powers) {
    std::array<float, 256> table{};
    std::vector<float> values(powers.levels.size());
    std::array<bool, 256> known{};
    std::transform(powers.levels.begin(), powers.levels.end(), values.begin(), [&](std::uint8_t level) {
        if (level > level_protected && !known[level]) {
            table[level] = rung_value((powers.first + level - level_protected - 1) * powers.pace);
            known[level] = true;
        }
        return table[level];
    });
    return values;
}

std::vector<float> outer(const std::vector<float>& rows, const std::vector<float>& columns) {
    std::vector<float> values;
    values.reserve(rows.size() * columns.size());
    for (const float row : rows)
        for (const float column : columns) values.push_back(row * column);
    return values;
}

bool is_good(const RootChanges& change, double tolerance) {
    if (change.unusable) return false;
    return change.count == 0 || std::sqrt(change.squares / static_cast<double>(change.count)) <= tolerance;
}

}  // namespace

SecondMomentForm small_second_moment(std::span<const float> values, double tolerance, Exponents factors,
                                     std::span<const LogGrid> grids, std::span<std::uint8_t> rows,
                                     std::span<std::uint8_t> columns, std::span<std::uint8_t> levels) {
    const Extremes found = extremes(values);
    if (!(found.lowest >= 0.0f && found.highest < infinity)) return {};
    if (!rows.empty()) {
        std::vector<double> row_sums(rows.size()), column_sums(columns.size());
        row_and_column_sums(values, row_sums, column_sums);
        if (const auto bins = rank_one(row_sums, column_sums, factors, rows, columns)) {
            const auto product =
                outer(decoded({rows, 1, bins->rows.first}), decoded({columns, 1, bins->columns.first}));
            if (is_good(root_changes(values, product), tolerance)) return *bins;
        }
    }
    std::vector<float> rounded(values.size());
    for (const LogGrid& grid : grids) {
        std::transform(values.begin(), values.end(), rounded.begin(),
                       [&](float value) { return grid.rounded[bucket_of(value)]; });
        if (!is_good(root_changes(values, rounded), tolerance)) continue;
        if (const auto bins = log_bins(smallest_from(values, smallest_power), found.highest, grid.exponents)) {
            log_levels(values, *bins, grid.exponents, levels);
            return OnLogGrid{grid.pace, *bins};
        }
    }
    return {};
}

std::optional<SmallFirstMoment> small_first_moment(std::span<const float> values, const Powers& second,
                                                   const std::optional<Powers>& columns, double tolerance,
                                                   double epsilon, std::span<const std::int32_t> rungs,
                                                   std::span<const float> inverses, std::span<std::uint8_t> levels) {
    const Extremes found = extremes(values);
    if (!(found.lowest > -infinity && found.highest < infinity)) return std::nullopt;
    const auto seconds = columns ? outer(decoded(second), decoded(*columns)) : decoded(second);
    for (std::size_t i = 0; i < values.size(); ++i)
        if (seconds[i] == 0.0f && values[i] != 0.0f) return std::nullopt;
    const WeighedUnits weighed(values, seconds, epsilon);
    const auto grid = coarsest_update(weighed, rungs, inverses, tolerance);
    if (!grid) return std::nullopt;
    return SmallFirstMoment{*grid, grid_levels(weighed.units, 1.0f / rung_value(grid->made), std::nullopt, 0, levels)};
}

}  // namespace dynaquant
