// How much a sample of stored moments changes updates, and what follows for their grids (method 2.3). Sums are the same on
// every machine.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "grid.hpp"
#include "tables.hpp"

namespace dynaquant {

// How decoded second moments change 1 / sqrt(v), over the values that are not zero. Values that are negligible before and
// after count as zero. If a decoded value of the others is zero or infinite, the sum counts for nothing.
struct RootChanges {
    bool unusable = false;
    double squares = 0.0;  // Σ (sqrt(v / decoded) - 1)²
    std::size_t count = 0;
};

// decoded: as many as values. negligible: the divisor of an update is the optimizer's epsilon up to so large a value.
RootChanges root_changes(std::span<const float> values, std::span<const float> decoded, float negligible);

struct Updates {
    double squares = 0.0;  // Σ sqrt(v) · update²
    float largest = 0.0f;  // the largest magnitude of a first moment
};

// First moments in units of the roots of their second moments, and their weights in the sums of a fit: updates are
// m / (sqrt(v) + epsilon), and each counts by sqrt(v).
struct WeighedUnits {
    WeighedUnits(std::span<const float> firsts, std::span<const float> seconds, double epsilon);

    Updates updates;
    std::vector<float> units;
    std::vector<double> products, factors;
};

// Sets fits[k] for first moments in units of the roots of their second moments, on the grid with step 1 / inverses[k],
// weighted as in WeighedUnits. seconds: as many as firsts; zero only where those are.
Updates update_fits(std::span<const float> firsts, std::span<const float> seconds, double epsilon,
                    std::span<const float> inverses, std::span<GridFit> fits);

// The grid of a first moment: the rung of the step that makes its levels, and that of the step that decodes them.
struct MomentGrid {
    int made = 0, decoded = 0;
};

// Returns the first grid, of the steps at these rungs, that changes the update by at most the tolerance; none if there is
// no such grid. Levels are decoded with another step than the one that made them, so that the moment keeps its length
// along its own direction: what is left after rounding is shorter. squares: of the updates, counted as in the fits. fits:
// of each step.
std::optional<MomentGrid> coarsest(double squares, std::span<const GridFit> fits, std::span<const std::int32_t> rungs,
                                   double tolerance);

// Returns the same for a moment in units of the root of its second moment. Fits no more grids than necessary. inverses:
// one by the step at each rung.
std::optional<MomentGrid> coarsest_update(const WeighedUnits& weighed, std::span<const std::int32_t> rungs,
                                          std::span<const float> inverses, double tolerance);

constexpr int positions_per_rung = 16;

// Where the values of each bucket lie on the ladder of rungs, in sixteenths of a rung.
using Positions = std::span<const std::int16_t, bucket_count>;

// How values are rounded to powers of 2^(pace/4). Between two powers lie positions_per_rung · pace positions, and each has
// as many classes as there are turns. A value goes up if its class is at least the threshold. Turns are equally frequent in
// a tensor: values that move alike need not all go up at once.
struct Rounding {
    Positions positions;
    int pace, threshold, turns = 1;

    static Rounding nearest(Positions positions, int pace) { return {positions, pace, pace * positions_per_rung / 2}; }
    static Rounding down(Positions positions, int pace, int turns) {
        return {positions, pace, pace * positions_per_rung * turns, turns};
    }
    int classes() const { return pace * positions_per_rung * turns; }
    int exponent(std::size_t bucket, int turn) const;  // of the power that values of a bucket are rounded to
    int turn_of(std::size_t bucket, std::size_t chunk) const;  // of a value in this chunk of rows
    std::uint16_t position_of(std::size_t bucket) const;  // above a power
};

constexpr float smallest_power = 0x1p-133f;  // the smallest value outside the bucket of zero

inline std::size_t bucket_of(float value) { return std::bit_cast<std::uint32_t>(value) >> 16; }

// Rows of a tensor are divided into as many chunks as there are turns.
inline std::size_t chunk_of(std::size_t row, std::size_t rows, int turns) {
    return row * static_cast<std::size_t>(turns) / rows;
}

// A logarithmic grid: bin i is the power with exponent first + i.
struct LogBins {
    int first = 0, bins = 0;
};

// Returns the bins that hold all values between these two, and zero; none if that takes too many levels. The first bin may
// be above the smallest value, but only so far that it is negligible, too. smallest: of the values that are not zero.
std::optional<LogBins> log_bins(float smallest, float largest, const Rounding& rounding, float negligible);

// Sets the level of each value. Values below the first bin are raised to it. values: not negative, not above the bins, all of
// a tensor. width: of its rows.
void log_levels(std::span<const float> values, std::size_t width, LogBins bins, const Rounding& rounding,
                std::span<std::uint8_t> levels);

struct RankOneBins {
    LogBins rows, columns;
};

constexpr int grid_turns = 64;
constexpr int factor_turns = 16;

// Sets the levels of factors whose outer product has these sums of rows and columns: row mean × column mean / mean.
// The longer factor (of equal ones, the rows) is rounded down, and its classes are set, as many as it has levels; the
// other one is rounded to the nearest power. Returns none if all values are zero, or if there are too many levels.
// negligible: of their products.
std::optional<RankOneBins> rank_one(std::span<const double> row_sums, std::span<const double> column_sums,
                                    Positions positions, std::span<std::uint8_t> rows, std::span<std::uint8_t> columns,
                                    std::span<std::uint16_t> classes, float negligible);

// Rounds levels up that were rounded down, where their class is at least the threshold (balanced_threshold). Returns the new
// bins, or none if there are too many.
std::optional<LogBins> round_up(std::span<std::uint8_t> levels, LogBins bins, std::span<const std::uint16_t> classes,
                                int threshold);

// How many steps a second moment allows: sums[c] is Σ sqrt(v / down) over the values of class c that are not negligible.
struct RootSums {
    std::vector<double> sums;
    std::size_t count = 0;
};

// down, classes: of each value. class_count: more than every class.
RootSums root_sums(std::span<const float> values, std::span<const float> down, std::span<const std::uint16_t> classes,
                   std::size_t class_count, float negligible);

// The threshold at which updates are as long as before on average: the mean of sqrt(v / rounded) is 1. Rounding to the
// nearest power would freeze a moment that is restored again and again before it has moved by half a pace. threshold: in
// positions; negative or larger than their number if all values must go up or down by one power, and some by another one. If
// the mean is not within 0.2 % there, the values at the position `split` go up by turns; Σ sqrt(v / rounded) of these
// values must be `rest` then.
struct Balance {
    int threshold;
    std::optional<int> split;
    double rest = 0.0;
};

// sums: RootSums by position, on powers of 2^(pace/4).
Balance balance(std::span<const double> sums, double count, int pace);

// Returns the turn from which on the values at the split position go up. sums: RootSums of these values by turn.
int first_turn(std::span<const double> sums, double rest, int pace);

// Some values of a second moment. chunks: of the row that each value is in.
struct MomentSample {
    std::span<const float> values;
    std::span<const std::uint8_t> chunks;
};

// Returns the RootSums of values that are rounded down to powers, by position. rounding: of any threshold.
RootSums sums_by_position(std::span<const float> values, const Rounding& rounding, float negligible);

// Returns the same sums, by turn, of the values at one position.
RootSums sums_by_turn(const MomentSample& sample, const Rounding& rounding, int position, float negligible);

// Returns the RootChanges of values that are rounded as log_levels does. powers: the value of each rung, from the lowest
// one to the highest one, in the dtype of the tensor.
RootChanges changes_by_rounding(const MomentSample& sample, const Rounding& rounding, std::span<const float> powers,
                                float negligible);

// The value of each rung as a float.
std::span<const float> rung_values();

}  // namespace dynaquant
