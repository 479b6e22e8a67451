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

std::vector<float> product_of(std::span<const std::uint8_t> rows, std::span<const std::uint8_t> columns,
                              const RankOneBins& bins) {
    return outer(decoded({rows, 1, bins.rows.first}), decoded({columns, 1, bins.columns.first}));
}

// Returns the threshold of balance, in turns. down: values rounded down. position_of, turn_of: by the index of a value.
template <class PositionOf, class TurnOf>
int balanced_threshold(std::span<const float> values, std::span<const float> down, int pace, int turns, float negligible,
                       const PositionOf& position_of, const TurnOf& turn_of) {
    std::vector<std::uint16_t> classes(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) classes[i] = static_cast<std::uint16_t>(position_of(i));
    const auto sums = root_sums(values, down, classes, static_cast<std::size_t>(pace * positions_per_rung), negligible);
    const Balance found = balance(sums.sums, static_cast<double>(sums.count), pace);
    if (!found.split) return found.threshold * turns;
    std::vector<double> of_turns(static_cast<std::size_t>(turns));
    for (std::size_t i = 0; i < values.size(); ++i)
        if (values[i] > negligible && classes[i] == *found.split)
            of_turns[static_cast<std::size_t>(turn_of(i))] += std::sqrt(static_cast<double>(values[i] / down[i]));
    return found.threshold * turns + first_turn(of_turns, found.rest, pace);
}

std::optional<RankOneBins> balanced_rank_one(std::span<const float> values, std::span<const double> row_sums,
                                             std::span<const double> column_sums, float negligible,
                                             Positions positions, std::span<std::uint8_t> rows,
                                             std::span<std::uint8_t> columns) {
    const bool by_rows = rows.size() >= columns.size();
    const auto longer = by_rows ? rows : columns;
    std::vector<std::uint16_t> of_longer(longer.size());
    auto bins = rank_one(row_sums, column_sums, positions, rows, columns, of_longer, negligible);
    if (!bins) return bins;
    const auto class_of = [&](std::size_t i) { return of_longer[by_rows ? i / columns.size() : i % columns.size()]; };
    const int threshold = balanced_threshold(
        values, product_of(rows, columns, *bins), 1, factor_turns, negligible,
        [&](std::size_t i) { return class_of(i) / factor_turns; }, [&](std::size_t i) { return class_of(i) % factor_turns; });
    LogBins& of_bins = by_rows ? bins->rows : bins->columns;
    const auto raised = round_up(longer, of_bins, of_longer, threshold);
    if (!raised) return std::nullopt;
    of_bins = *raised;
    return bins;
}

}  // namespace

SecondMomentForm small_second_moment(std::span<const float> values, double tolerance, double of_rank_one, float negligible,
                                     Positions positions, std::span<const int> paces, std::span<std::uint8_t> rows,
                                     std::span<std::uint8_t> columns, std::span<std::uint8_t> levels) {
    const Extremes found = extremes(values);
    if (!(found.lowest >= 0.0f && found.highest < infinity)) return {};
    if (!rows.empty()) {
        std::vector<double> row_sums(rows.size()), column_sums(columns.size());
        row_and_column_sums(values, row_sums, column_sums);
        if (const auto bins = balanced_rank_one(values, row_sums, column_sums, negligible, positions, rows, columns))
            if (is_good(root_changes(values, product_of(rows, columns, *bins), negligible), of_rank_one)) return *bins;
    }
    const float smallest = smallest_from(values, smallest_power);
    const std::size_t width = rows.empty() ? 1 : columns.size();
    for (const int pace : paces) {
        Rounding rounding = Rounding::down(positions, pace, grid_turns);
        auto bins = log_bins(smallest, found.highest, rounding, negligible);
        if (!bins) continue;
        log_levels(values, width, *bins, rounding, levels);
        rounding.threshold = balanced_threshold(
            values, decoded({levels, pace, bins->first}), pace, grid_turns, negligible,
            [&](std::size_t i) { return rounding.position_of(bucket_of(values[i])); },
            [&](std::size_t i) { return rounding.turn_of(bucket_of(values[i]), i / width, values.size() / width); });
        bins = log_bins(smallest, found.highest, rounding, negligible);
        if (!bins) continue;
        log_levels(values, width, *bins, rounding, levels);
        const auto change = root_changes(values, decoded({levels, pace, bins->first}), negligible);
        if (is_good(change, tolerance)) return OnLogGrid{pace, *bins};
    }
    return {};
}

std::optional<SmallFirstMoment> small_first_moment(std::span<const float> values, const Powers& second,
                                                   const std::optional<Powers>& columns, double tolerance,
                                                   double epsilon, float zero, std::span<const std::int32_t> rungs,
                                                   std::span<const float> inverses, std::span<std::uint8_t> levels) {
    const Extremes found = extremes(values);
    if (!(found.lowest > -infinity && found.highest < infinity)) return std::nullopt;
    const auto seconds = columns ? outer(decoded(second), decoded(*columns)) : decoded(second);
    for (std::size_t i = 0; i < values.size(); ++i)
        if (seconds[i] == 0.0f && std::abs(values[i]) > zero) return std::nullopt;
    const WeighedUnits weighed(values, seconds, epsilon);
    const auto grid = coarsest_update(weighed, rungs, inverses, tolerance);
    if (!grid) return std::nullopt;
    return SmallFirstMoment{*grid, grid_levels(weighed.units, 1.0f / rung_value(grid->made), std::nullopt, 0, levels)};
}

}  // namespace dynaquant
