// Passes over values, for Python.
#include "bindings.hpp"

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "grid.hpp"
#include "magnitudes.hpp"
#include "roots.hpp"
#include "sums.hpp"
#include "tables.hpp"

namespace {

template <class Bits>
void log_histogram(const Array<const Bits>& values, const Table<std::int64_t>& counts) {
    const nb::gil_scoped_release release;
    dynaquant::log_histogram<Bits>(view(values), view(counts));
}

template <class Bits>
void assign_levels(const Array<const Bits>& values, const Table<const std::uint8_t>& table,
                   const Array<const std::uint32_t>& sensitivity,
                   const Table<const std::uint8_t>& sensitivity_table, const Array<std::uint8_t>& levels) {
    check_same_size(values.size(), levels.size());
    if (sensitivity.size() != 0) check_same_size(values.size(), sensitivity.size());
    const nb::gil_scoped_release release;
    dynaquant::assign_levels<Bits>(view(values), view(table), view(sensitivity), view(sensitivity_table),
                                   view(levels));
}

template <class Bits>
void levels_in_turns(const Array<const Bits>& values, const Table<const std::uint8_t>& low,
                     const Table<const std::uint8_t>& high, const Array<const std::uint8_t>& goes_up,
                     const Array<const std::uint8_t>& turns, const Array<std::uint8_t>& levels) {
    check_same_size(values.size(), levels.size());
    const auto of_rows = view(turns);
    if (of_rows.empty() ? values.size() != 0 : values.size() % of_rows.size() != 0)
        throw std::invalid_argument("the values are not those of so many rows");
    if (!of_rows.empty() && goes_up.size() < (dynaquant::highest_of(of_rows) + std::size_t{1}) * 256)
        throw std::invalid_argument("a turn is too large");
    const nb::gil_scoped_release release;
    dynaquant::levels_in_turns<Bits>(view(values), view(low), view(high), view(goes_up), of_rows, view(levels));
}

nb::bytes protected_places(const Array<const std::uint8_t>& levels) {
    std::vector<std::int64_t> found;
    {
        const nb::gil_scoped_release release;
        found = dynaquant::protected_places(view(levels));
    }
    return nb::bytes(found.data(), found.size() * sizeof(std::int64_t));
}

template <class Bits>
void values_of_levels(const Array<const std::uint8_t>& levels, const Array<const Bits>& table,
                      const Array<const std::uint16_t>& protected_values, const Array<Bits>& out) {
    check_same_size(levels.size(), out.size());
    const nb::gil_scoped_release release;
    dynaquant::values_of_levels<Bits>(view(levels), view(table), view(protected_values), view(out));
}

std::uint32_t grid_levels(const Array<const float>& values, float inverse, std::optional<std::uint32_t> seed,
                          std::size_t first, const Array<std::uint8_t>& levels) {
    check_same_size(values.size(), levels.size());
    const nb::gil_scoped_release release;
    return dynaquant::grid_levels(view(values), inverse, seed, first, view(levels));
}

void grid_values(const Array<const float>& values, float inverse, float step, std::optional<std::uint32_t> seed,
                 std::size_t first, const Array<float>& out) {
    check_same_size(values.size(), out.size());
    const nb::gil_scoped_release release;
    dynaquant::grid_values(view(values), inverse, step, seed, first, view(out));
}

std::tuple<double, double, std::uint32_t> grid_errors(const Array<const float>& values, float inverse, float step,
                                                      std::optional<std::uint32_t> seed, std::size_t first,
                                                      const Array<std::uint8_t>& levels) {
    if (levels.size() != 0) check_same_size(values.size(), levels.size());
    const nb::gil_scoped_release release;
    const auto found = dynaquant::grid_errors(view(values), inverse, step, seed, first, view(levels));
    return {found.squares, found.errors, found.highest};
}

std::pair<double, double> pair_of(const dynaquant::Magnitude& found) { return {found.mean_square, found.small}; }

std::pair<double, double> matrix_magnitude(const Array<const double>& row_sums,
                                           const Array<const double>& column_sums) {
    const nb::gil_scoped_release release;
    return pair_of(dynaquant::matrix_magnitude(view(row_sums), view(column_sums)));
}

bool is_uneven(const Array<const double>& counts, const Array<const double>& row_sums,
               const Array<const double>& column_sums) {
    const nb::gil_scoped_release release;
    return dynaquant::is_uneven(view(counts), view(row_sums), view(column_sums));
}

std::pair<double, double> vector_magnitude(const Array<const double>& values) {
    const nb::gil_scoped_release release;
    return pair_of(dynaquant::vector_magnitude(view(values)));
}

std::optional<std::pair<double, double>> tensor_magnitude(const Array<const float>& values, std::size_t rows) {
    if (values.size() == 0 || rows == 0 || values.size() % rows != 0)
        throw std::invalid_argument("the values are not those of so many rows");
    const nb::gil_scoped_release release;
    const auto found = dynaquant::tensor_magnitude(view(values), rows);
    if (!found) return std::nullopt;
    return pair_of(*found);
}

std::pair<double, double> sums(const Array<const float>& values) {
    const nb::gil_scoped_release release;
    const auto found = dynaquant::sums(view(values));
    return {found.values, found.squares};
}

void divide_by_roots(const Array<const float>& values, const Array<const float>& seconds, const Array<float>& out) {
    check_same_size(values.size(), seconds.size());
    check_same_size(values.size(), out.size());
    const nb::gil_scoped_release release;
    dynaquant::divide_by_roots(view(values), view(seconds), view(out));
}

void multiply_by_roots(const Array<float>& values, const Array<const float>& seconds) {
    check_same_size(values.size(), seconds.size());
    const nb::gil_scoped_release release;
    dynaquant::multiply_by_roots(view(values), view(seconds));
}

void divide_by_outer_roots(const Array<const float>& values, const Array<const float>& rows,
                           const Array<const float>& columns, const Array<float>& out) {
    check_same_size(values.size(), rows.size() * columns.size());
    check_same_size(values.size(), out.size());
    const nb::gil_scoped_release release;
    dynaquant::divide_by_roots(view(values), view(rows), view(columns), view(out));
}

void multiply_by_outer_roots(const Array<float>& values, const Array<const float>& rows,
                             const Array<const float>& columns) {
    check_same_size(values.size(), rows.size() * columns.size());
    const nb::gil_scoped_release release;
    dynaquant::multiply_by_roots(view(values), view(rows), view(columns));
}

std::uint32_t grid_levels_of_units(const Array<const float>& values, const Array<const float>& seconds,
                                   const std::optional<Array<const float>>& columns, float inverse,
                                   const Array<std::uint8_t>& levels) {
    check_same_size(values.size(), seconds.size() * (columns ? columns->size() : 1));
    check_same_size(values.size(), levels.size());
    const nb::gil_scoped_release release;
    if (columns)
        return dynaquant::grid_levels_of_units(view(values), view(seconds), view(*columns), inverse, view(levels));
    return dynaquant::grid_levels_of_units(view(values), view(seconds), inverse, view(levels));
}

void multiply_by_level_roots(const Array<float>& values, const Array<const std::uint8_t>& levels,
                             const Array<const float>& table) {
    check_same_size(values.size(), levels.size());
    const nb::gil_scoped_release release;
    dynaquant::multiply_by_level_roots(view(values), view(levels), view(table));
}

std::uint32_t grid_levels_of_level_units(const Array<const float>& values, const Array<const std::uint8_t>& seconds,
                                         const Array<const float>& table, float inverse,
                                         const Array<std::uint8_t>& levels) {
    check_same_size(values.size(), seconds.size());
    check_same_size(values.size(), levels.size());
    const nb::gil_scoped_release release;
    return dynaquant::grid_levels_of_level_units(view(values), view(seconds), view(table), inverse, view(levels));
}

std::pair<double, double> errors(const Array<const float>& values, const Array<const float>& exact) {
    check_same_size(values.size(), exact.size());
    const nb::gil_scoped_release release;
    const auto found = dynaquant::errors(view(values), view(exact));
    return {found.squares, found.errors};
}

std::pair<float, float> extremes(const Array<const float>& values) {
    const nb::gil_scoped_release release;
    const auto found = dynaquant::extremes(view(values));
    return {found.lowest, found.highest};
}

std::tuple<float, float, float> extremes_from(const Array<const float>& values, float limit) {
    const nb::gil_scoped_release release;
    const auto found = dynaquant::extremes_from(view(values), limit);
    return {found.lowest, found.highest, found.smallest};
}

void row_and_column_sums(const Array<const float>& values, const Array<double>& row_sums,
                         const Array<double>& column_sums) {
    check_same_size(values.size(), row_sums.size() * column_sums.size());
    const nb::gil_scoped_release release;
    dynaquant::row_and_column_sums(view(values), view(row_sums), view(column_sums));
}

}  // namespace

void bind_values(nb::module_& m) {
    using nb::literals::operator""_a;
    const char* histogram_doc = "Adds to counts[b] the number of values whose top 16 bits are b.";
    m.def("log_histogram", &log_histogram<std::uint32_t>, "values"_a.noconvert(), "counts"_a.noconvert(),
          histogram_doc);
    m.def("log_histogram", &log_histogram<std::uint16_t>, "values"_a.noconvert(), "counts"_a.noconvert(),
          histogram_doc);
    const char* assign_doc =
        "Sets levels[i] to table[top 16 bits of values[i]], unless sensitivity_table prunes or protects the weight.";
    m.def("assign_levels", &assign_levels<std::uint32_t>, "values"_a.noconvert(), "table"_a.noconvert(),
          "sensitivity"_a.noconvert(), "sensitivity_table"_a.noconvert(), "levels"_a.noconvert(), assign_doc);
    m.def("assign_levels", &assign_levels<std::uint16_t>, "values"_a.noconvert(), "table"_a.noconvert(),
          "sensitivity"_a.noconvert(), "sensitivity_table"_a.noconvert(), "levels"_a.noconvert(), assign_doc);
    const char* turns_doc =
        "Sets levels[i] to low[top 16 bits of values[i]], or to high where goes_up[256 * turn + that level] is not zero.\n"
        "turns: of each row of the values. ValueError: there are not so many rows, or goes_up has fewer turns.";
    m.def("levels_in_turns", &levels_in_turns<std::uint32_t>, "values"_a.noconvert(), "low"_a.noconvert(),
          "high"_a.noconvert(), "goes_up"_a.noconvert(), "turns"_a.noconvert(), "levels"_a.noconvert(), turns_doc);
    m.def("levels_in_turns", &levels_in_turns<std::uint16_t>, "values"_a.noconvert(), "low"_a.noconvert(),
          "high"_a.noconvert(), "goes_up"_a.noconvert(), "turns"_a.noconvert(), "levels"_a.noconvert(), turns_doc);
    m.def("protected_places", &protected_places, "levels"_a.noconvert(),
          "Returns where the protected levels are, as the bytes of int64.");
    const char* values_doc =
        "Sets out[i] to table[levels[i]], or for LEVEL_PROTECTED to the next protected value, as its top 16 bits.\n"
        "ValueError: a level is outside the table, or the numbers of protected values and levels differ.";
    m.def("values_of_levels", &values_of_levels<std::uint32_t>, "levels"_a.noconvert(), "table"_a.noconvert(),
          "protected_values"_a.noconvert(), "out"_a.noconvert(), values_doc);
    m.def("values_of_levels", &values_of_levels<std::uint16_t>, "levels"_a.noconvert(), "table"_a.noconvert(),
          "protected_values"_a.noconvert(), "out"_a.noconvert(), values_doc);
    m.def("grid_levels", &grid_levels, "values"_a.noconvert(), "inverse"_a, "seed"_a.none(), "first"_a,
          "levels"_a.noconvert(),
          "Fills levels of the grid with step 1 / inverse; returns the highest, or 256 if a value is protected.\n"
          "seed: a number selects stochastic rounding; None rounds to the nearest. first: the index of the first value\n"
          "in its tensor, for stochastic rounding.");
    m.def("grid_values", &grid_values, "values"_a.noconvert(), "inverse"_a, "step"_a, "seed"_a.none(), "first"_a,
          "out"_a.noconvert(),
          "Fills the values that the levels of grid_levels are restored to, without making the levels.\n"
          "first: the index of the first value in its tensor, for stochastic rounding.");
    m.def("grid_errors", &grid_errors, "values"_a.noconvert(), "inverse"_a, "step"_a, "seed"_a.none(), "first"_a,
          "levels"_a.noconvert(),
          "Returns what errors does for the values that grid_values fills, without making them, and what grid_levels\n"
          "returns. Fills the levels in the same pass, unless levels is empty.");
    m.def("matrix_magnitude", &matrix_magnitude, "row_sums"_a.noconvert(), "column_sums"_a.noconvert(),
          "Returns the mean square of a matrix without outliers, and the root mean square of its small rows or columns.\n"
          "row_sums, column_sums: of squares. ValueError: all are zero.");
    m.def("vector_magnitude", &vector_magnitude, "values"_a.noconvert(),
          "Returns the mean square of a vector without outliers, and its standard deviation. ValueError: all values are\n"
          "the same.");
    m.def("tensor_magnitude", &tensor_magnitude, "values"_a.noconvert(), "rows"_a,
          "Returns what matrix_magnitude or vector_magnitude does, of values row by row. None if all are the same or not\n"
          "finite, if their squares could overflow or vanish, or if a matrix is too uneven for a grid. ValueError: no values,\n"
          "or not so many rows.");
    m.def("is_uneven", &is_uneven, "counts"_a.noconvert(), "row_sums"_a.noconvert(), "column_sums"_a.noconvert(),
          "Returns whether a matrix is too uneven for a grid. counts: of a sample, by the exponent bits of its values as\n"
          "float32. row_sums, column_sums: of all squares. ValueError: all are zero, or not one count for each exponent.");
    m.def("uneven_pace", &dynaquant::uneven_pace, "size"_a,
          "Returns the distance between two values of the sample that is_uneven takes of so many values.");
    m.def("sums", &sums, "values"_a.noconvert(),
          "Returns the sums of the values and of their squares, in double precision, the same on every machine.");
    m.def("divide_by_roots", &divide_by_roots, "values"_a.noconvert(), "seconds"_a.noconvert(), "out"_a.noconvert(),
          "Fills value / sqrt(second), correctly rounded; zero where the second is zero.");
    m.def("multiply_by_roots", &multiply_by_roots, "values"_a.noconvert(), "seconds"_a.noconvert(),
          "Multiplies each value by sqrt(second).");
    m.def("divide_by_outer_roots", &divide_by_outer_roots, "values"_a.noconvert(), "rows"_a.noconvert(),
          "columns"_a.noconvert(), "out"_a.noconvert(),
          "Does what divide_by_roots does, with the outer product of rows and columns as seconds.");
    m.def("multiply_by_outer_roots", &multiply_by_outer_roots, "values"_a.noconvert(), "rows"_a.noconvert(),
          "columns"_a.noconvert(), "Does what multiply_by_roots does, with the outer product of rows and columns.");
    m.def("grid_levels_of_units", &grid_levels_of_units, "values"_a.noconvert(), "seconds"_a.noconvert(),
          "columns"_a.noconvert().none(), "inverse"_a, "levels"_a.noconvert(),
          "Does what grid_levels does for what divide_by_roots fills, without a seed. columns: None, or seconds are the\n"
          "rows of divide_by_outer_roots.");
    m.def("multiply_by_level_roots", &multiply_by_level_roots, "values"_a.noconvert(), "levels"_a.noconvert(),
          "table"_a.noconvert(),
          "Does what multiply_by_roots does, with table[level] as seconds. ValueError: a level is outside the table.");
    m.def("grid_levels_of_level_units", &grid_levels_of_level_units, "values"_a.noconvert(), "seconds"_a.noconvert(),
          "table"_a.noconvert(), "inverse"_a, "levels"_a.noconvert(),
          "Does what grid_levels_of_units does, with table[second] as seconds. ValueError: a second is outside the table.");
    m.def("errors", &errors, "values"_a.noconvert(), "exact"_a.noconvert(),
          "Returns the sums of the squares of exact values, and of the differences of the values from them.");
    m.def("extremes", &extremes, "values"_a.noconvert(),
          "Returns the lowest and the highest value; NaN twice if any value is NaN. ValueError: there are no values.");
    m.def("extremes_from", &extremes_from, "values"_a.noconvert(), "limit"_a,
          "Returns what extremes does, and the smallest value that is at least the limit, which is above zero; infinity if\n"
          "there is none.");
    m.def("row_and_column_sums", &row_and_column_sums, "values"_a.noconvert(), "row_sums"_a.noconvert(),
          "column_sums"_a.noconvert(), "Fills the sums of the rows and columns of a matrix. values: row by row.");
}
