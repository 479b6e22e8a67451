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

[[gnu::always_inline]] inline RootChanges changes(std::span<const float> values, const float* decoded) {
    std::array<double, lanes> squares{};
    std::array<std::size_t, lanes> counts{}, unusable{};
    const auto add = [&](std::size_t i, std::size_t lane) {
        const bool counted = values[i] > 0.0f;
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

RootChanges changes_plain(std::span<const float> values, const float* decoded) { return changes(values, decoded); }
DYNAQUANT_AVX2 RootChanges changes_avx2(std::span<const float> values, const float* decoded) {
    return changes(values, decoded);
}

// Sets the weights of a value's update in the sums of a fit, and returns the sums of the updates themselves.
[[gnu::always_inline]] inline Updates weigh(std::span<const float> firsts, const float* seconds, double epsilon,
                                            double* products, double* factors) {
    std::array<double, lanes> squares{};
    std::array<float, lanes> largest{};
    const auto add = [&](std::size_t i, std::size_t lane) {
        const double root = std::sqrt(static_cast<double>(seconds[i])), divisor = root + epsilon;
        const double update = static_cast<double>(firsts[i]) / divisor, factor = root / divisor;
        products[i] = update * factor;
        factors[i] = factor * factor;
        squares[lane] += update * update;
        largest[lane] = std::max(largest[lane], std::abs(firsts[i]));
    };
    const std::size_t whole = firsts.size() / lanes * lanes;
    for (std::size_t i = 0; i < whole; i += lanes)
        for (std::size_t lane = 0; lane < lanes; ++lane) add(i + lane, lane);
    for (std::size_t i = whole; i < firsts.size(); ++i) add(i, i - whole);
    return {sum_of(squares), *std::max_element(largest.begin(), largest.end())};
}

Updates weigh_plain(std::span<const float> firsts, const float* seconds, double epsilon, double* products,
                    double* factors) {
    return weigh(firsts, seconds, epsilon, products, factors);
}
DYNAQUANT_AVX2 Updates weigh_avx2(std::span<const float> firsts, const float* seconds, double epsilon,
                                  double* products, double* factors) {
    return weigh(firsts, seconds, epsilon, products, factors);
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

std::optional<LogBins> factor(std::span<const double> sums, double length, double root, Exponents exponents,
                              std::span<std::uint8_t> levels) {
    std::vector<float> values(sums.size());
    std::transform(sums.begin(), sums.end(), values.begin(),
                   [&](double sum) { return static_cast<float>(sum / length / root); });
    const auto bins = log_bins(smallest_from(values, smallest_power), extremes(values).highest, exponents);
    if (bins) log_levels(values, *bins, exponents, levels);
    return bins;
}

}  // namespace

RootChanges root_changes(std::span<const float> values, std::span<const float> decoded) {
    return (has_avx2() ? changes_avx2 : changes_plain)(values, decoded.data());
}

WeighedUnits::WeighedUnits(std::span<const float> firsts, std::span<const float> seconds, double epsilon)
    : units(firsts.size()), products(firsts.size()), factors(firsts.size()) {
    updates = (has_avx2() ? weigh_avx2 : weigh_plain)(firsts, seconds.data(), epsilon, products.data(), factors.data());
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

std::optional<LogBins> log_bins(float smallest, float largest, Exponents exponents) {
    if (!(largest >= smallest_power)) return LogBins{};
    const int first = exponents[bucket_of(smallest)], last = exponents[bucket_of(largest)];
    if (last - first + 1 > max_bins) return std::nullopt;
    return LogBins{first, last - first + 1};
}

void log_levels(std::span<const float> values, LogBins bins, Exponents exponents, std::span<std::uint8_t> levels) {
    std::transform(values.begin(), values.end(), levels.begin(), [&](float value) {
        const std::size_t bucket = bucket_of(value);
        return (bucket & 0x7FFF) == 0 ? level_pruned : static_cast<std::uint8_t>(exponents[bucket] - bins.first + first_bin);
    });
}

std::optional<RankOneBins> rank_one(std::span<const double> row_sums, std::span<const double> column_sums,
                                    Exponents exponents, std::span<std::uint8_t> rows,
                                    std::span<std::uint8_t> columns) {
    const double height = static_cast<double>(row_sums.size()), width = static_cast<double>(column_sums.size());
    double total = 0.0;
    for (const double sum : row_sums) total += sum / width;
    const double root = std::sqrt(total / height);
    if (!(root > 0.0 && root < std::numeric_limits<double>::infinity())) return std::nullopt;
    const auto row_bins = factor(row_sums, width, root, exponents, rows);
    const auto column_bins = factor(column_sums, height, root, exponents, columns);
    if (!row_bins || !column_bins) return std::nullopt;
    return RankOneBins{*row_bins, *column_bins};
}

}  // namespace dynaquant
