// How much a sample of stored moments changes updates, and what follows for their grids.
#include "moments.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu.hpp"
#include "roots.hpp"
#include "rungs.hpp"
#include "sums.hpp"

namespace dynaquant {
namespace {

constexpr std::size_t lanes = 16;  // independent sums: enough for compilers to vectorise
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr int largest_shift = 2 * rungs_per_octave;  // steps that make and that decode levels differ by two octaves at most
constexpr float largest_first = 1e37f;  // restored values, which can be several times as large, would be infinite
constexpr int first_bin = 2;
constexpr int max_bins = 256 - first_bin;

double sum_of(const std::array<double, lanes>& parts) {
    double sum = 0.0;
    for (const double part : parts) sum += part;
    return sum;
}

[[gnu::always_inline]] inline RootChanges changes(std::span<const float> values, const float* decoded,
                                                  float negligible) {
    std::array<double, lanes> squares{};
    std::array<std::size_t, lanes> counts{}, unusable{};
    const auto add = [&](std::size_t i, std::size_t lane) {
        const bool counted = values[i] > negligible || (values[i] > 0.0f && decoded[i] > negligible);
        const double change = std::sqrt(static_cast<double>(values[i] / decoded[i])) - 1.0;
        squares[lane] += counted ? change * change : 0.0;
        counts[lane] += counted;
        unusable[lane] += counted && !(decoded[i] > 0.0f && decoded[i] < infinity);
    };
    const std::size_t whole = values.size() / lanes * lanes;
    for (std::size_t i = 0; i < whole; i += lanes)
        for (std::size_t lane = 0; lane < lanes; ++lane) add(i + lane, lane);
    for (std::size_t i = whole; i < values.size(); ++i) add(i, i - whole);
    RootChanges found;
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        found.count += counts[lane];
        found.unusable = found.unusable || unusable[lane] != 0;
    }
    found.squares = found.unusable ? 0.0 : sum_of(squares);
    return found;
}

// Sets the weights of a value's update in the sums of a fit, and returns the sums of the updates themselves. An update
// counts by the root of its second moment, which is about as large as the gradient: by how much it lowers the loss.
[[gnu::always_inline]] inline Updates weigh(std::span<const float> firsts, const float* seconds, double epsilon,
                                            double* products, double* factors) {
    std::array<double, lanes> squares{};
    std::array<float, lanes> largest{};
    const auto add = [&](std::size_t i, std::size_t lane) {
        const double root = std::sqrt(static_cast<double>(seconds[i])), divisor = root + epsilon;
        const double update = static_cast<double>(firsts[i]) / divisor, factor = root / divisor;
        products[i] = root * update * factor;
        factors[i] = root * factor * factor;
        squares[lane] += root * update * update;
        largest[lane] = std::max(largest[lane], std::abs(firsts[i]));
    };
    const std::size_t whole = firsts.size() / lanes * lanes;
    for (std::size_t i = 0; i < whole; i += lanes)
        for (std::size_t lane = 0; lane < lanes; ++lane) add(i + lane, lane);
    for (std::size_t i = whole; i < firsts.size(); ++i) add(i, i - whole);
    return {sum_of(squares), *std::max_element(largest.begin(), largest.end())};
}

// Returns how many rungs larger the step must be to restore the moment's length; none if that is too many. kept: the
// restored length along the moment's own direction, relative to the moment's.
std::optional<int> shift_of(double kept) {
    if (!(kept > 0.0 && kept < std::numeric_limits<double>::infinity())) return std::nullopt;
    const double shift = std::nearbyint(rungs_per_octave * -std::log2(kept));
    if (std::abs(shift) > largest_shift) return std::nullopt;
    return static_cast<int>(shift);
}

// Returns the distance by the norm, from the squares of both.
double relative_error(double squared_distance, double squared_norm) {
    if (!std::isfinite(squared_distance)) return std::numeric_limits<double>::infinity();
    if (squared_norm == 0.0) return squared_distance != 0.0 ? std::numeric_limits<double>::infinity() : 0.0;
    return std::sqrt(std::max(squared_distance, 0.0)) / std::sqrt(squared_norm);
}

int floor_division(int dividend, int divisor) {
    return dividend / divisor - (dividend % divisor < 0);
}

// The rows or columns of a rank-one form before they are rounded.
struct Factor {
    Factor(std::span<const double> sums, double length, double root) : values(sums.size()) {
        std::transform(sums.begin(), sums.end(), values.begin(),
                       [&](double sum) { return static_cast<float>(sum / length / root); });
        const auto found = extremes_from(values, smallest_power);
        smallest = found.smallest;
        largest = found.highest;
    }

    std::vector<float> values;
    float smallest, largest;
};

// classes: empty, or set for each value. negligible: of products with the other factor.
std::optional<LogBins> rounded(const Factor& factor, const Factor& other, const Rounding& rounding,
                               std::span<std::uint8_t> levels, std::span<std::uint16_t> classes, float negligible) {
    const std::vector<float>& values = factor.values;
    const auto bins = log_bins(factor.smallest, factor.largest, rounding, negligible / other.largest);
    if (!bins) return bins;
    log_levels(values, 1, *bins, rounding, levels);
    for (std::size_t i = 0; i < classes.size(); ++i) {
        const std::size_t bucket = bucket_of(values[i]);
        classes[i] = static_cast<std::uint16_t>(rounding.position_of(bucket) * rounding.turns +
                                                rounding.turn_of(bucket, chunk_of(i, values.size(), rounding.turns)));
    }
    return bins;
}

// Returns a power of 2^(pace/4), zero for the bucket of zero. powers: by rung, from the lowest one on.
float power_of(std::size_t bucket, int exponent, int pace, std::span<const float> powers) {
    return bucket == 0 ? 0.0f : powers[static_cast<std::size_t>(exponent * pace - lowest_rung)];
}

// What rounding up makes of sqrt(v / down).
double up_by(int pace) {
    double up = 1.0;
    for (int i = 0; i < pace; ++i) up *= std::sqrt(std::sqrt(std::sqrt(0.5)));
    return up;
}

// Σ sqrt(v / rounded) by threshold, from 0 to the number of sums. It never falls.
std::vector<double> by_threshold(std::span<const double> sums, double up) {
    double below = 0.0, above = 0.0;
    for (const double sum : sums) above += sum;
    std::vector<double> found{up * above};
    for (const double sum : sums) {
        below += sum;
        above -= sum;
        found.push_back(below + up * above);
    }
    return found;
}

// Returns the threshold whose sum is nearest to the wanted one; of equal ones, that nearest to the middle.
int nearest_threshold(std::span<const double> found, double wanted) {
    const int middle = static_cast<int>(found.size()) / 2;
    int best = middle;
    for (int t = 0; t < static_cast<int>(found.size()); ++t) {
        const auto distance = [&](int at) { return std::abs(found[static_cast<std::size_t>(at)] - wanted); };
        if (distance(t) < distance(best) || (distance(t) == distance(best) && std::abs(t - middle) < std::abs(best - middle)))
            best = t;
    }
    return best;
}

}  // namespace

RootChanges root_changes(std::span<const float> values, std::span<const float> decoded, float negligible) {
    return with_widest([&]() DYNAQUANT_INLINED { return changes(values, decoded.data(), negligible); });
}

WeighedUnits::WeighedUnits(std::span<const float> firsts, std::span<const float> seconds, double epsilon)
    : units(firsts.size()), products(firsts.size()), factors(firsts.size()) {
    updates = with_widest([&]() DYNAQUANT_INLINED {
        return weigh(firsts, seconds.data(), epsilon, products.data(), factors.data());
    });
    divide_by_roots(firsts, seconds, units);
}

Updates update_fits(std::span<const float> firsts, std::span<const float> seconds, double epsilon,
                    std::span<const float> inverses, std::span<GridFit> fits) {
    const WeighedUnits weighed(firsts, seconds, epsilon);
    grid_fits(weighed.units, weighed.products, weighed.factors, inverses, fits);
    return weighed.updates;
}

std::optional<MomentGrid> coarsest(double squares, std::span<const GridFit> fits, std::span<const std::int32_t> rungs,
                                   double tolerance) {
    for (std::size_t i = 0; i < rungs.size(); ++i) {
        const GridFit& fit = fits[i];
        const double kept = static_cast<double>(rung_value(rungs[i])) * fit.product + fit.protected_product;
        const auto shift = shift_of(squares != 0.0 ? kept / squares : 1.0);
        if (!shift) continue;
        const int decoded = std::clamp(rungs[i] + *shift, lowest_rung, highest_step_rung);
        const double step = static_cast<double>(rung_value(decoded));
        const double restored = step * step * fit.square + fit.protected_square;
        const double distance = squares + restored - 2 * (step * fit.product + fit.protected_product);
        if (relative_error(distance, squares) <= tolerance) return MomentGrid{rungs[i], decoded};
    }
    return std::nullopt;
}

std::optional<MomentGrid> coarsest_update(const WeighedUnits& weighed, std::span<const std::int32_t> rungs,
                                          std::span<const float> inverses, double tolerance) {
    if (weighed.updates.largest > largest_first) return std::nullopt;
    for (std::size_t i = 0; i < rungs.size(); ++i) {
        GridFit fit;
        grid_fits(weighed.units, weighed.products, weighed.factors, inverses.subspan(i, 1), {&fit, 1});
        if (const auto found = coarsest(weighed.updates.squares, {&fit, 1}, rungs.subspan(i, 1), tolerance)) return found;
    }
    return std::nullopt;
}

int Rounding::exponent(std::size_t bucket, int turn) const {
    const int lowest = -floor_division(-lowest_rung, pace), highest = floor_division(highest_rung, pace);
    const int above = positions[bucket] * turns + turn - threshold;
    return std::clamp(floor_division(above, classes()) + 1, lowest, highest);
}

int Rounding::turn_of(std::size_t bucket, std::size_t chunk) const {
    // A value that has gone up or down gets another turn, so that the same ones do not go again and again.
    const int down = floor_division(positions[bucket], pace * positions_per_rung), away = (turns * 5 / 8) | 1;
    return (static_cast<int>(chunk) - away * down) & (turns - 1);
}

std::uint16_t Rounding::position_of(std::size_t bucket) const {
    const int position = positions[bucket], whole = pace * positions_per_rung;
    return static_cast<std::uint16_t>(position - floor_division(position, whole) * whole);
}

std::optional<LogBins> log_bins(float smallest, float largest, const Rounding& rounding, float negligible) {
    if (bucket_of(largest) == 0) return LogBins{};  // not by floats: processors may treat subnormal ones as zero
    // Rounding may make a value up to twice as large. It is to be negligible also then.
    smallest = std::max(smallest, std::min(negligible / 4, largest));
    const int first = rounding.exponent(bucket_of(smallest), 0);
    const int last = rounding.exponent(bucket_of(largest), rounding.turns - 1);
    if (last - first + 1 > max_bins) return std::nullopt;
    return LogBins{first, last - first + 1};
}

void log_levels(std::span<const float> values, std::size_t width, LogBins bins, const Rounding& rounding,
                std::span<std::uint8_t> levels) {
    const bool in_turns = rounding.threshold % rounding.turns != 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        const std::size_t bucket = bucket_of(values[i]);
        const std::size_t chunk = in_turns ? chunk_of(i / width, values.size() / width, rounding.turns) : 0;
        const int turn = in_turns ? rounding.turn_of(bucket, chunk) : 0;
        levels[i] = (bucket & 0x7FFF) == 0
                        ? level_pruned
                        : static_cast<std::uint8_t>(std::max(rounding.exponent(bucket, turn), bins.first) - bins.first +
                                                    first_bin);
    }
}

std::optional<LogBins> round_up(std::span<std::uint8_t> levels, LogBins bins, std::span<const std::uint16_t> classes,
                                int threshold) {
    int lowest = 256, highest = -256;
    const auto bin_of = [&](std::size_t i) { return levels[i] - first_bin + 1 + floor_division(classes[i] - threshold, factor_turns * positions_per_rung); };
    for (std::size_t i = 0; i < levels.size(); ++i) {
        if (levels[i] == level_pruned) continue;
        lowest = std::min(lowest, bin_of(i));
        highest = std::max(highest, bin_of(i));
    }
    if (highest < lowest) return bins;
    if (highest - lowest + 1 > max_bins) return std::nullopt;
    for (std::size_t i = 0; i < levels.size(); ++i)
        if (levels[i] != level_pruned) levels[i] = static_cast<std::uint8_t>(bin_of(i) - lowest + first_bin);
    return LogBins{bins.first + lowest, highest - lowest + 1};
}

RootSums root_sums(std::span<const float> values, std::span<const float> down, std::span<const std::uint16_t> classes,
                   std::size_t class_count, float negligible) {
    RootSums found{std::vector<double>(class_count), 0};
    constexpr std::size_t at_a_time = 512;
    std::array<double, at_a_time> roots;
    for (std::size_t begin = 0; begin < values.size(); begin += at_a_time) {
        const std::size_t count = std::min(at_a_time, values.size() - begin);
        with_widest([&]() DYNAQUANT_INLINED {
            for (std::size_t i = 0; i < count; ++i)
                roots[i] = std::sqrt(static_cast<double>(values[begin + i] / down[begin + i]));
        });
        for (std::size_t i = 0; i < count; ++i) {
            if (!(values[begin + i] > negligible)) continue;
            found.sums[classes[begin + i]] += roots[i];
            ++found.count;
        }
    }
    return found;
}

Balance balance(std::span<const double> sums, double count, int pace) {
    constexpr double near_enough = 0.002;
    const int positions = static_cast<int>(sums.size());
    const double up = up_by(pace);
    double all = 0.0;
    for (const double sum : sums) all += sum;
    if (!(all > 0.0 && std::isfinite(all)) || count == 0.0) return {positions / 2, {}};
    // Rows cannot make up for what was rounded in columns unless all of them move.
    int moved = 0;
    double wanted = count;
    if (all < count) {
        moved = positions;
        wanted = count * up;
    } else if (all * up > count) {
        moved = -positions;
        wanted = count / up;
    }
    const auto found = by_threshold(sums, up);
    const int best = nearest_threshold(found, wanted);
    if (std::abs(found[static_cast<std::size_t>(best)] - wanted) <= near_enough * wanted) return {best + moved, {}};
    const auto beyond = std::upper_bound(found.begin(), found.end(), wanted);
    if (beyond == found.begin() || beyond == found.end()) return {best + moved, {}};
    const int split = static_cast<int>(beyond - found.begin()) - 1;
    const double of_split = sums[static_cast<std::size_t>(split)];
    return {split + moved, split, wanted - (found[static_cast<std::size_t>(split)] - up * of_split)};
}

int first_turn(std::span<const double> sums, double rest, int pace) {
    return nearest_threshold(by_threshold(sums, up_by(pace)), rest);
}

RootSums sums_by_position(std::span<const float> values, const Rounding& rounding, float negligible) {
    const Rounding down = Rounding::down(rounding.positions, rounding.pace, 1);
    const auto powers = rung_values();
    std::vector<float> rounded(values.size());
    std::vector<std::uint16_t> positions(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        const std::size_t bucket = bucket_of(values[i]);
        rounded[i] = power_of(bucket, down.exponent(bucket, 0), down.pace, powers);
        positions[i] = down.position_of(bucket);
    }
    return root_sums(values, rounded, positions, static_cast<std::size_t>(down.classes()), negligible);
}

RootSums sums_by_turn(const MomentSample& sample, const Rounding& rounding, int position, float negligible) {
    const Rounding down = Rounding::down(rounding.positions, rounding.pace, 1);
    const auto powers = rung_values();
    std::vector<float> values, rounded;
    std::vector<std::uint16_t> turns;
    for (std::size_t i = 0; i < sample.values.size(); ++i) {
        const std::size_t bucket = bucket_of(sample.values[i]);
        if (down.position_of(bucket) != position) continue;
        values.push_back(sample.values[i]);
        rounded.push_back(power_of(bucket, down.exponent(bucket, 0), down.pace, powers));
        turns.push_back(static_cast<std::uint16_t>(rounding.turn_of(bucket, sample.chunks[i])));
    }
    return root_sums(values, rounded, turns, static_cast<std::size_t>(rounding.turns), negligible);
}

RootChanges changes_by_rounding(const MomentSample& sample, const Rounding& rounding, std::span<const float> powers,
                                float negligible) {
    const bool in_turns = rounding.threshold % rounding.turns != 0;
    const bool raises = negligible / 4 >= smallest_power;  // as log_bins does
    const int first = raises ? rounding.exponent(bucket_of(negligible / 4), 0) : lowest_rung;
    std::vector<float> rounded(sample.values.size());
    for (std::size_t i = 0; i < rounded.size(); ++i) {
        const std::size_t bucket = bucket_of(sample.values[i]);
        const int exponent = rounding.exponent(bucket, in_turns ? rounding.turn_of(bucket, sample.chunks[i]) : 0);
        rounded[i] = power_of(bucket, std::max(exponent, first), rounding.pace, powers);
    }
    return root_changes(sample.values, rounded, negligible);
}

std::span<const float> rung_values() {
    static const std::vector<float> values = [] {
        std::vector<float> found;
        for (int rung = lowest_rung; rung <= highest_rung; ++rung) found.push_back(rung_value(rung));
        return found;
    }();
    return values;
}

std::optional<RankOneBins> rank_one(std::span<const double> row_sums, std::span<const double> column_sums,
                                    Positions positions, std::span<std::uint8_t> rows, std::span<std::uint8_t> columns,
                                    std::span<std::uint16_t> classes, float negligible) {
    const double height = static_cast<double>(row_sums.size()), width = static_cast<double>(column_sums.size());
    double total = 0.0;
    for (const double sum : row_sums) total += sum / width;
    const double root = std::sqrt(total / height);
    if (!(root > 0.0 && root < std::numeric_limits<double>::infinity())) return std::nullopt;
    const Rounding nearest = Rounding::nearest(positions, 1), down = Rounding::down(positions, 1, factor_turns);
    const bool by_rows = rows.size() >= columns.size();
    const std::span<std::uint16_t> none, of_rows = by_rows ? classes : none, of_columns = by_rows ? none : classes;
    const Factor by_row(row_sums, width, root), by_column(column_sums, height, root);
    const auto row_bins = rounded(by_row, by_column, by_rows ? down : nearest, rows, of_rows, negligible);
    const auto column_bins = rounded(by_column, by_row, by_rows ? nearest : down, columns, of_columns, negligible);
    if (!row_bins || !column_bins) return std::nullopt;
    return RankOneBins{*row_bins, *column_bins};
}

}  // namespace dynaquant
