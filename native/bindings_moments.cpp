// What quantizes moments, for Python.
#include "bindings.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "grid.hpp"
#include "moments.hpp"
#include "small_moments.hpp"

namespace {

// Sums of grid fits, as many as fits has room for.
void copy_fits(const std::vector<dynaquant::GridFit>& found, double* out) {
    for (const auto& fit : found)
        for (const double sum : {fit.product, fit.square, fit.protected_product, fit.protected_square}) *out++ = sum;
}

void grid_fits(const Array<const float>& values, const Array<const double>& products,
               const Array<const double>& squares, const Array<const float>& inverses, const Array<double>& fits) {
    check_same_size(values.size(), products.size());
    check_same_size(values.size(), squares.size());
    check_same_size(4 * inverses.size(), fits.size());
    const nb::gil_scoped_release release;
    std::vector<dynaquant::GridFit> found(inverses.size());
    dynaquant::grid_fits(view(values), view(products), view(squares), view(inverses), found);
    copy_fits(found, fits.data());
}

std::pair<double, float> update_fits(const Array<const float>& firsts, const Array<const float>& seconds,
                                     double epsilon, const Array<const float>& inverses, const Array<double>& fits) {
    check_same_size(firsts.size(), seconds.size());
    check_same_size(4 * inverses.size(), fits.size());
    const nb::gil_scoped_release release;
    std::vector<dynaquant::GridFit> found(inverses.size());
    const auto updates = dynaquant::update_fits(view(firsts), view(seconds), epsilon, view(inverses), found);
    copy_fits(found, fits.data());
    return {updates.squares, updates.largest};
}

std::tuple<bool, double, std::size_t> root_changes(const Array<const float>& values, const Array<const float>& decoded,
                                                    float negligible) {
    check_same_size(values.size(), decoded.size());
    const nb::gil_scoped_release release;
    const auto found = dynaquant::root_changes(view(values), view(decoded), negligible);
    return {found.unusable, found.squares, found.count};
}

std::optional<std::pair<int, int>> coarsest(double squares, const Array<const double>& fits,
                                            const Array<const std::int32_t>& rungs, double tolerance) {
    check_same_size(fits.size(), 4 * rungs.size());
    std::vector<dynaquant::GridFit> sums(rungs.size());
    const auto numbers = view(fits);
    for (std::size_t i = 0; i < sums.size(); ++i)
        sums[i] = {numbers[4 * i], numbers[4 * i + 1], numbers[4 * i + 2], numbers[4 * i + 3]};
    const auto found = dynaquant::coarsest(squares, sums, view(rungs), tolerance);
    if (!found) return std::nullopt;
    return std::pair{found->made, found->decoded};
}

std::optional<std::pair<int, int>> coarsest_update(const Array<const float>& firsts, const Array<const float>& seconds,
                                                   double epsilon, const Array<const std::int32_t>& rungs,
                                                   const Array<const float>& inverses, double tolerance) {
    check_same_size(firsts.size(), seconds.size());
    check_same_size(rungs.size(), inverses.size());
    const nb::gil_scoped_release release;
    const dynaquant::WeighedUnits weighed(view(firsts), view(seconds), epsilon);
    const auto found = dynaquant::coarsest_update(weighed, view(rungs), view(inverses), tolerance);
    if (!found) return std::nullopt;
    return std::pair{found->made, found->decoded};
}

using Bins = std::pair<int, int>;

Bins pair_of(dynaquant::LogBins bins) { return {bins.first, bins.bins}; }

// How values are rounded, by the numbers of Python.
dynaquant::Rounding rounding_of(const Table<const std::int16_t>& positions, int pace, int threshold, int turns) {
    if (pace < 1 || turns < 1) throw std::invalid_argument("the pace or the number of turns is less than 1");
    return {view(positions), pace, threshold, turns};
}

std::pair<std::vector<double>, std::size_t> pair_of(dynaquant::RootSums found) {
    return {std::move(found.sums), found.count};
}

std::optional<Bins> log_bins(float smallest, float largest, const Table<const std::int16_t>& positions, int pace,
                             int threshold, int turns, float negligible) {
    const auto found = dynaquant::log_bins(smallest, largest, rounding_of(positions, pace, threshold, turns), negligible);
    if (!found) return std::nullopt;
    return pair_of(*found);
}

std::optional<std::pair<Bins, Bins>> rank_one(const Array<const double>& row_sums,
                                              const Array<const double>& column_sums,
                                              const Table<const std::int16_t>& positions,
                                              const Array<std::uint8_t>& rows, const Array<std::uint8_t>& columns,
                                              const Array<std::uint16_t>& classes, float negligible) {
    check_same_size(row_sums.size(), rows.size());
    check_same_size(column_sums.size(), columns.size());
    check_same_size(classes.size(), std::max(rows.size(), columns.size()));
    if (!row_sums.size() || !column_sums.size()) throw std::invalid_argument("there are no values");
    const auto found = dynaquant::rank_one(view(row_sums), view(column_sums), view(positions), view(rows), view(columns),
                                           view(classes), negligible);
    if (!found) return std::nullopt;
    return std::pair{pair_of(found->rows), pair_of(found->columns)};
}

std::optional<Bins> round_up(const Array<std::uint8_t>& levels, Bins bins, const Array<const std::uint16_t>& classes,
                             int threshold) {
    check_same_size(levels.size(), classes.size());
    const auto found = dynaquant::round_up(view(levels), {bins.first, bins.second}, view(classes), threshold);
    if (!found) return std::nullopt;
    return pair_of(*found);
}

std::pair<std::vector<double>, std::size_t> root_sums(const Array<const float>& values, const Array<const float>& down,
                                                      const Array<const std::uint16_t>& classes, std::size_t count,
                                                      float negligible) {
    check_same_size(values.size(), down.size());
    check_same_size(values.size(), classes.size());
    const auto all = view(classes);
    if (std::any_of(all.begin(), all.end(), [&](std::uint16_t one) { return one >= count; }))
        throw std::invalid_argument("a class is too large");
    return pair_of(dynaquant::root_sums(view(values), view(down), view(classes), count, negligible));
}

std::tuple<int, std::optional<int>, double> balance(const Array<const double>& sums, double count, int pace) {
    const auto found = dynaquant::balance(view(sums), count, pace);
    return {found.threshold, found.split, found.rest};
}

int first_turn(const Array<const double>& sums, double rest, int pace) {
    return dynaquant::first_turn(view(sums), rest, pace);
}

std::pair<std::vector<double>, std::size_t> sums_by_position(const Array<const float>& values,
                                                             const Table<const std::int16_t>& positions, int pace,
                                                             float negligible) {
    return pair_of(dynaquant::sums_by_position(view(values), rounding_of(positions, pace, 0, 1), negligible));
}

std::pair<std::vector<double>, std::size_t> sums_by_turn(const Array<const float>& values,
                                                         const Array<const std::uint8_t>& chunks,
                                                         const Table<const std::int16_t>& positions, int pace, int turns,
                                                         int position, float negligible) {
    check_same_size(values.size(), chunks.size());
    const auto rounding = rounding_of(positions, pace, 0, turns);
    return pair_of(dynaquant::sums_by_turn({view(values), view(chunks)}, rounding, position, negligible));
}

std::tuple<bool, double, std::size_t> changes_by_rounding(const Array<const float>& values,
                                                          const Array<const std::uint8_t>& chunks,
                                                          const Table<const std::int16_t>& positions, int pace,
                                                          int threshold, int turns, const Array<const float>& powers,
                                                          float negligible) {
    check_same_size(values.size(), chunks.size());
    check_same_size(powers.size(), dynaquant::rung_values().size());
    const auto rounding = rounding_of(positions, pace, threshold, turns);
    const auto found = dynaquant::changes_by_rounding({view(values), view(chunks)}, rounding, view(powers), negligible);
    return {found.unusable, found.squares, found.count};
}

// The tables that moments of small tensors are quantized with. It keeps the arrays.
class SmallMoments {
public:
    SmallMoments(Table<const std::int16_t> positions, std::vector<int> paces, const Array<const std::int32_t>& rungs,
                 const Array<const float>& inverses)
        : positions_(std::move(positions)), paces_(std::move(paces)) {
        check_same_size(rungs.size(), inverses.size());
        rungs_.assign(rungs.data(), rungs.data() + rungs.size());
        inverses_.assign(inverses.data(), inverses.data() + inverses.size());
    }

    // None; the bins of rows and of columns; or a pace and the bins of levels.
    std::variant<nb::object, std::pair<Bins, Bins>, std::pair<int, Bins>> second(
        const Array<const float>& values, double tolerance, double of_rank_one, float negligible,
        const Array<std::uint8_t>& rows, const Array<std::uint8_t>& columns, const Array<std::uint8_t>& levels) const {
        check_same_size(values.size(), levels.size());
        if (rows.size() != 0) check_same_size(values.size(), rows.size() * columns.size());
        const auto found = dynaquant::small_second_moment(view(values), tolerance, of_rank_one, negligible, view(positions_),
                                                          paces_, view(rows), view(columns), view(levels));
        if (const auto* factors = std::get_if<dynaquant::RankOneBins>(&found))
            return std::pair{pair_of(factors->rows), pair_of(factors->columns)};
        if (const auto* grid = std::get_if<dynaquant::OnLogGrid>(&found)) return std::pair{grid->pace, pair_of(grid->bins)};
        return nb::none();
    }

    // None; or the rung that decodes levels, and the highest level.
    std::optional<std::pair<int, std::uint32_t>> first(
        const Array<const float>& values, const Array<const std::uint8_t>& second, int first_of_second,
        const std::optional<Array<const std::uint8_t>>& columns, int first_of_columns, int pace, double tolerance,
        double epsilon, float zero, const Array<std::uint8_t>& levels) const {
        check_same_size(values.size(), levels.size());
        check_same_size(values.size(), second.size() * (columns ? columns->size() : 1));
        std::optional<dynaquant::Powers> across;
        if (columns) across = {view(*columns), pace, first_of_columns};
        const auto found = dynaquant::small_first_moment(view(values), {view(second), pace, first_of_second}, across,
                                                         tolerance, epsilon, zero, rungs_, inverses_, view(levels));
        if (!found) return std::nullopt;
        return std::pair{found->grid.decoded, found->highest};
    }

private:
    Table<const std::int16_t> positions_;
    std::vector<int> paces_;
    std::vector<std::int32_t> rungs_;
    std::vector<float> inverses_;
};

}  // namespace

void bind_moments(nb::module_& m) {
    using nb::literals::operator""_a;
    m.def("grid_fits", &grid_fits, "values"_a.noconvert(), "products"_a.noconvert(), "squares"_a.noconvert(),
          "inverses"_a.noconvert(), "fits"_a.noconvert(),
          "Fills four sums for each grid with step 1 / inverse: Σ r · product and Σ r² · square over the values that are\n"
          "rounded to the multiple r of the step; the same over the protected values, where r is the value.");
    m.def("update_fits", &update_fits, "firsts"_a.noconvert(), "seconds"_a.noconvert(), "epsilon"_a,
          "inverses"_a.noconvert(), "fits"_a.noconvert(),
          "Fills what grid_fits does for first moments in units of the roots of second moments, weighted as updates\n"
          "m / (sqrt(v) + epsilon) are, each of which counts by sqrt(v). Returns the sum of the squares of updates,\n"
          "counted alike, and the largest magnitude of a first moment.");
    m.def("root_changes", &root_changes, "values"_a.noconvert(), "decoded"_a.noconvert(), "negligible"_a,
          "Returns of the values above zero, but for those that are negligible before and after: whether one is decoded\n"
          "to zero or infinity, the sum of (sqrt(value / decoded) - 1)², and how many there are.");
    m.def("coarsest", &coarsest, "squares"_a, "fits"_a.noconvert(), "rungs"_a.noconvert(), "tolerance"_a,
          "Returns the rungs of the steps that make and that decode the levels of a first moment: of the first of the\n"
          "given rungs that changes the update by at most the tolerance. None: there is none. squares, fits: of\n"
          "update_fits or grid_fits.");
    m.def("coarsest_update", &coarsest_update, "firsts"_a.noconvert(), "seconds"_a.noconvert(), "epsilon"_a,
          "rungs"_a.noconvert(), "inverses"_a.noconvert(), "tolerance"_a,
          "Returns what coarsest does with the sums of update_fits, but computes no more of them than necessary.");
    m.def("log_bins", &log_bins, "smallest"_a, "largest"_a, "positions"_a.noconvert(), "pace"_a, "threshold"_a,
          "turns"_a, "negligible"_a,
          "Returns the first exponent and the number of the bins that hold all values between these two; None if that\n"
          "takes too many levels. Negligible values may be below the first bin. smallest: of the values that are not zero.\n"
          "positions: as for rank_one. threshold, turns: log_grid.Threshold.");
    m.def("rank_one", &rank_one, "row_sums"_a.noconvert(), "column_sums"_a.noconvert(), "positions"_a.noconvert(),
          "rows"_a.noconvert(), "columns"_a.noconvert(), "classes"_a.noconvert(), "negligible"_a,
          "Fills the levels of factors whose outer product has these sums. The longer one (of equal ones, the rows) is\n"
          "rounded down, and its classes, 256 at most, are filled, for round_up. positions: on the ladder, of each\n"
          "bucket, in sixteenths of a rung. Returns the first exponent and the number of bins of the rows, and the same\n"
          "of the columns; None if all values are zero or there are too many levels. ValueError: there are no values.");
    m.def("round_up", &round_up, "levels"_a.noconvert(), "bins"_a, "classes"_a.noconvert(), "threshold"_a,
          "Rounds levels up whose class is at least the threshold. Returns the new bins; None if there are too many.");
    m.def("root_sums", &root_sums, "values"_a.noconvert(), "down"_a.noconvert(), "classes"_a.noconvert(), "count"_a,
          "negligible"_a,
          "Returns the sum of sqrt(value / down) of each class, and how many values are not negligible. ValueError: a\n"
          "class is not less than count.");
    m.def("balance", &balance, "sums"_a.noconvert(), "count"_a, "pace"_a,
          "Returns the threshold of rounding, in positions, at which updates are as long as before on average; the\n"
          "position whose values go up by turns, or None; and the sum of sqrt(value / rounded) that these need. sums,\n"
          "count: of root_sums, by position.");
    m.def("first_turn", &first_turn, "sums"_a.noconvert(), "rest"_a, "pace"_a,
          "Returns the turn from which on values at the split position go up. sums: of root_sums, by turn.");
    m.def("sums_by_position", &sums_by_position, "values"_a.noconvert(), "positions"_a.noconvert(), "pace"_a,
          "negligible"_a, "Returns what root_sums does by position, of values rounded down to powers of 2^(pace/4).");
    m.def("sums_by_turn", &sums_by_turn, "values"_a.noconvert(), "chunks"_a.noconvert(), "positions"_a.noconvert(),
          "pace"_a, "turns"_a, "position"_a, "negligible"_a,
          "Returns what root_sums does by turn, of the values at a position. chunks: of the row that each value is in.");
    m.def("changes_by_rounding", &changes_by_rounding, "values"_a.noconvert(), "chunks"_a.noconvert(),
          "positions"_a.noconvert(), "pace"_a, "threshold"_a, "turns"_a, "powers"_a.noconvert(), "negligible"_a,
          "Returns what root_changes does, of values that are rounded to powers. powers: of all rungs, in the tensor's dtype.");
    nb::class_<SmallMoments>(m, "SmallMoments", "Quantizes moments of small tensors, each in one call.")
        .def(nb::init<Table<const std::int16_t>, std::vector<int>, const Array<const std::int32_t>&,
                      const Array<const float>&>(),
             "positions"_a.noconvert(), "paces"_a, "rungs"_a.noconvert(), "inverses"_a.noconvert(),
             "positions: as for rank_one. paces: of the grids to try, coarsest first.")
        .def("second", &SmallMoments::second, "values"_a.noconvert(), "tolerance"_a, "of_rank_one"_a, "negligible"_a,
             "rows"_a.noconvert(), "columns"_a.noconvert(), "levels"_a.noconvert(),
             "Fills rows and columns, and returns their bins; or fills levels, and returns their pace and bins; or\n"
             "returns None: store it exactly. of_rank_one: the tolerance of rows and columns, 0 if they are not tried. They\n"
             "are empty if it is no matrix.")
        .def("first", &SmallMoments::first, "values"_a.noconvert(), "second"_a.noconvert(), "first_of_second"_a,
             "columns"_a.none().noconvert(), "first_of_columns"_a, "pace"_a, "tolerance"_a, "epsilon"_a,
             "zero"_a, "levels"_a.noconvert(),
             "Fills levels, and returns the rung that decodes them, and the highest level; None: store it exactly.\n"
             "second, columns: levels of the second moment's rows and columns, or of all values and None. zero: larger\n"
             "values may not be divided by zero.");
}
