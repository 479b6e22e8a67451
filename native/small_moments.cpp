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

// Returns the threshold of balance, in turns. by_turn: returns the sums of the values at a position, by turn.
template <class ByTurn>
int balanced_threshold(const RootSums& by_position, int pace, int turns, const ByTurn& by_turn) {
    const Balance found = balance(by_position.sums, static_cast<double>(by_position.count), pace);
    const int threshold = found.threshold * turns;
    return found.split ? threshold + first_turn(by_turn(*found.split).sums, found.rest, pace) : threshold;
}

std::optional<RankOneBins> balanced_rank_one(std::span<const float> values, std::span<const double> row_sums,
                                             std::span<const double> column_sums, float negligible,
                                             Positions positions, std::span<std::uint8_t> rows,
                                             std::span<std::uint8_t> columns) {
    const bool by_rows = rows.size() >= columns.size();
    const auto longer = by_rows ? rows : columns;
    std::vector<std::uint16_t> of_longer(longer.size()), places(values.size());
    auto bins = rank_one(row_sums, column_sums, positions, rows, columns, of_longer, negligible);
    if (!bins) return bins;
    const auto down = product_of(rows, columns, *bins);
    const auto class_of = [&](std::size_t i) { return of_longer[by_rows ? i / columns.size() : i % columns.size()]; };
    for (std::size_t i = 0; i < values.size(); ++i) places[i] = class_of(i) / factor_turns;
    const auto by_position = root_sums(values, down, places, positions_per_rung, negligible);
    const int threshold = balanced_threshold(by_position, 1, factor_turns, [&](int split) {
        std::vector<float> there, down_there;
        std::vector<std::uint16_t> turns;
        for (std::size_t i = 0; i < values.size(); ++i) {
            if (places[i] != split) continue;
            there.push_back(values[i]);
            down_there.push_back(down[i]);
            turns.push_back(class_of(i) % factor_turns);
        }
        return root_sums(there, down_there, turns, factor_turns, negligible);
    });
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
    const ExtremesFrom found = extremes_from(values, smallest_power);
    if (!(found.lowest >= 0.0f && found.highest < infinity)) return {};
    if (!rows.empty() && of_rank_one > 0.0) {
        std::vector<double> row_sums(rows.size()), column_sums(columns.size());
        row_and_column_sums(values, row_sums, column_sums);
        if (const auto bins = balanced_rank_one(values, row_sums, column_sums, negligible, positions, rows, columns))
            if (is_good(root_changes(values, product_of(rows, columns, *bins), negligible), of_rank_one)) return *bins;
    }
    const std::size_t width = rows.empty() ? 1 : columns.size();
    std::vector<std::uint8_t> chunks(values.size());
    for (std::size_t i = 0; i < values.size(); ++i)
        chunks[i] = static_cast<std::uint8_t>(chunk_of(i / width, values.size() / width, grid_turns));
    const MomentSample all{values, chunks};
    for (const int pace : paces) {
        Rounding rounding = Rounding::down(positions, pace, grid_turns);
        rounding.threshold = balanced_threshold(
            sums_by_position(values, rounding, negligible), pace, grid_turns,
            [&](int split) { return sums_by_turn(all, rounding, split, negligible); });
        if (!is_good(changes_by_rounding(all, rounding, rung_values(), negligible), tolerance)) continue;
        const auto bins = log_bins(found.smallest, found.highest, rounding, negligible);
        if (!bins) continue;
        log_levels(values, width, *bins, rounding, levels);
        return OnLogGrid{pace, *bins};
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
