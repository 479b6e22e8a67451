// The Python module dynaquant._native: NumPy arrays in, NumPy arrays or bytes out. The long functions release the GIL.
// std::invalid_argument becomes ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "conditional.hpp"
#include "cpu.hpp"
#include "lossless.hpp"
#include "grid.hpp"
#include "levels.hpp"
#include "magnitudes.hpp"
#include "moments.hpp"
#include "nearest.hpp"
#include "roots.hpp"
#include "small_moments.hpp"
#include "sums.hpp"
#include "tables.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace {

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<T, nb::shape<65536>, nb::c_contig, nb::device::cpu>;

using Contexts = nb::ndarray<const std::uint8_t, nb::shape<256>, nb::c_contig, nb::device::cpu>;

// Checks the alignment: an array in a memory-mapped file may begin at any byte, but C++ needs aligned numbers.
template <class T>
T* aligned(T* data) {
    if (reinterpret_cast<std::uintptr_t>(data) % alignof(T) != 0)
        throw std::invalid_argument("an array does not begin at a multiple of the size of its elements");
    return data;
}

template <class T>
std::span<T> view(const Array<T>& array) {
    return {aligned(array.data()), array.size()};
}

template <class T>
std::span<T, dynaquant::bucket_count> view(const Table<T>& table) {
    return std::span<T, dynaquant::bucket_count>(aligned(table.data()), dynaquant::bucket_count);
}

std::span<const std::uint8_t, 256> view(const Contexts& table) {
    return std::span<const std::uint8_t, 256>(table.data(), 256);
}

void check_same_size(std::size_t a, std::size_t b) {
    if (a != b) throw std::invalid_argument("arrays differ in size");
}

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
void values_of_levels(const Array<const std::uint8_t>& levels, const Array<const Bits>& table,
                      const Array<const std::uint16_t>& protected_values, const Array<Bits>& out) {
    check_same_size(levels.size(), out.size());
    const nb::gil_scoped_release release;
    dynaquant::values_of_levels<Bits>(view(levels), view(table), view(protected_values), view(out));
}

nb::bytes encode_levels(const Array<const std::uint8_t>& levels, const Array<const std::uint8_t>& parent,
                        std::size_t modulus, std::size_t groups, bool run_length) {
    std::vector<std::uint8_t> stream;
    {
        const nb::gil_scoped_release release;
        stream = dynaquant::encode_levels(view(levels), view(parent), modulus, groups, run_length);
    }
    return nb::bytes(stream.data(), stream.size());
}

void decode_levels(const nb::bytes& stream, const Array<const std::uint8_t>& parent, std::size_t modulus,
                   std::size_t groups, const Array<std::uint8_t>& levels) {
    const std::span bytes(reinterpret_cast<const std::uint8_t*>(stream.data()), stream.size());
    const nb::gil_scoped_release release;
    dynaquant::decode_levels(bytes, view(parent), modulus, groups, view(levels));
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

std::pair<double, double> pair_of(const dynaquant::Magnitude& found) { return {found.mean_square, found.small}; }

std::pair<double, double> matrix_magnitude(const Array<const double>& row_sums,
                                           const Array<const double>& column_sums) {
    const nb::gil_scoped_release release;
    return pair_of(dynaquant::matrix_magnitude(view(row_sums), view(column_sums)));
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

std::optional<Bins> log_bins(float smallest, float largest, const Table<const std::int16_t>& positions, int pace,
                             int threshold, int turns, float negligible) {
    if (pace < 1 || turns < 1) throw std::invalid_argument("the pace or the number of turns is less than 1");
    const auto found = dynaquant::log_bins(smallest, largest, {view(positions), pace, threshold, turns}, negligible);
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
    auto found = dynaquant::root_sums(view(values), view(down), view(classes), count, negligible);
    return {std::move(found.sums), found.count};
}

std::tuple<int, std::optional<int>, double> balance(const Array<const double>& sums, double count, int pace) {
    const auto found = dynaquant::balance(view(sums), count, pace);
    return {found.threshold, found.split, found.rest};
}

int first_turn(const Array<const double>& sums, double rest, int pace) {
    return dynaquant::first_turn(view(sums), rest, pace);
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
        const Array<const float>& values, double tolerance, float negligible, const Array<std::uint8_t>& rows,
        const Array<std::uint8_t>& columns, const Array<std::uint8_t>& levels) const {
        check_same_size(values.size(), levels.size());
        if (rows.size() != 0) check_same_size(values.size(), rows.size() * columns.size());
        const auto found = dynaquant::small_second_moment(view(values), tolerance, negligible, view(positions_), paces_,
                                                          view(rows), view(columns), view(levels));
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

float smallest_from(const Array<const float>& values, float limit) {
    const nb::gil_scoped_release release;
    return dynaquant::smallest_from(view(values), limit);
}

void row_and_column_sums(const Array<const float>& values, const Array<double>& row_sums,
                         const Array<double>& column_sums) {
    check_same_size(values.size(), row_sums.size() * column_sums.size());
    const nb::gil_scoped_release release;
    dynaquant::row_and_column_sums(view(values), view(row_sums), view(column_sums));
}

std::optional<nb::bytes> encode_conditional(const Array<const std::uint8_t>& levels,
                                            const Array<const std::uint8_t>& parent,
                                            const Table<const std::uint8_t>& symbol_of, const Contexts& context_of,
                                            std::size_t contexts, std::optional<double> least_gain) {
    std::optional<std::vector<std::uint8_t>> stream;
    {
        const nb::gil_scoped_release release;
        stream = dynaquant::encode_conditional(view(levels), view(parent), view(symbol_of), view(context_of), contexts,
                                               least_gain);
    }
    if (!stream) return std::nullopt;
    return nb::bytes(stream->data(), stream->size());
}

void decode_conditional(const nb::bytes& stream, const Array<const std::uint8_t>& parent,
                        const Table<const std::uint8_t>& level_of, const Contexts& context_of, std::size_t contexts,
                        std::size_t symbols, const Array<std::uint8_t>& levels) {
    const std::span bytes(reinterpret_cast<const std::uint8_t*>(stream.data()), stream.size());
    const nb::gil_scoped_release release;
    dynaquant::decode_conditional(bytes, view(parent), view(level_of), view(context_of), contexts, symbols,
                                  view(levels));
}

void nearest_levels(const Array<const double>& positions, const Array<const double>& sources, bool is_parent,
                    const Table<std::uint8_t>& level_of) {
    dynaquant::nearest_levels(view(positions), view(sources), is_parent, view(level_of));
}

void symbols_of_levels(const Table<const std::uint8_t>& level_of, std::size_t symbols,
                       const Table<std::uint8_t>& symbol_of) {
    dynaquant::symbols_of_levels(view(level_of), symbols, view(symbol_of));
}

// Returns all pieces, one after the other.
nb::bytes joined(const std::vector<std::vector<std::uint8_t>>& pieces) {
    std::size_t size = 0;
    for (const auto& piece : pieces) size += piece.size();
    PyObject* const bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
    if (bytes == nullptr) throw nb::python_error();
    auto owner = nb::steal<nb::bytes>(bytes);
    char* out = PyBytes_AS_STRING(bytes);
    const nb::gil_scoped_release release;  // nobody else knows the object yet
    for (const auto& piece : pieces) {
        std::memcpy(out, piece.data(), piece.size());
        out += piece.size();
    }
    return owner;
}

nb::bytes encode_lossless(const Array<const std::uint8_t>& data, const Array<const std::uint8_t>& parent,
                          std::size_t itemsize) {
    std::vector<std::vector<std::uint8_t>> pieces;
    {
        const nb::gil_scoped_release release;
        pieces = dynaquant::encode_lossless(view(data), view(parent), itemsize);
    }
    return joined(pieces);
}

void decode_lossless(const nb::bytes& stream, const Array<const std::uint8_t>& parent, std::size_t itemsize,
                     const Array<std::uint8_t>& data) {
    const std::span bytes(reinterpret_cast<const std::uint8_t*>(stream.data()), stream.size());
    const nb::gil_scoped_release release;
    dynaquant::decode_lossless(bytes, view(parent), itemsize, view(data));
}

bool decodes_to(const nb::bytes& stream, const Array<const std::uint8_t>& parent, std::size_t itemsize,
                const Array<const std::uint8_t>& data) {
    const std::span bytes(reinterpret_cast<const std::uint8_t*>(stream.data()), stream.size());
    const nb::gil_scoped_release release;
    return dynaquant::decodes_to(bytes, view(parent), itemsize, view(data));
}

const std::vector<std::string> instruction_names = {"plain", "avx2", "avx512"};

std::vector<std::string> instructions() {
    const auto most = static_cast<std::ptrdiff_t>(dynaquant::supported_instructions());
    return {instruction_names.begin(), instruction_names.begin() + most + 1};
}

void limit_instructions(const std::string& most) {
    for (std::size_t i = 0; i < instruction_names.size(); ++i)
        if (instruction_names[i] == most)
            return dynaquant::limit_instructions(static_cast<dynaquant::Instructions>(i));
    throw std::invalid_argument("there are no instructions '" + most + "'");
}

std::size_t threads() { return dynaquant::thread_limit(dynaquant::Processors::of_this_thread()); }

}  // namespace

NB_MODULE(_native, m) {
    using nb::literals::operator""_a;
    m.attr("LEVEL_PRUNED") = dynaquant::level_pruned;
    m.attr("LEVEL_PROTECTED") = dynaquant::level_protected;
    m.attr("UNDECIDED") = dynaquant::undecided;

    m.def("threads", &threads,
          "Returns how many threads a call may use, the calling thread included (docs/guide.md).\n"
          "ValueError: DYNAQUANT_THREADS is not a positive number.");

    m.def("instructions", &instructions,
          "Returns the sets of instructions that functions of this module have loops for and this processor can run,\n"
          "from 'plain' to the one that is used.");
    m.def("limit_instructions", &limit_instructions, "most"_a,
          "Makes all functions use at most these instructions, for tests and benchmarks. Results are the same.\n"
          "ValueError: not one of instructions().");

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
    const char* values_doc =
        "Sets out[i] to table[levels[i]], or for LEVEL_PROTECTED to the next protected value, as its top 16 bits.\n"
        "ValueError: a level is outside the table, or the numbers of protected values and levels differ.";
    m.def("values_of_levels", &values_of_levels<std::uint32_t>, "levels"_a.noconvert(), "table"_a.noconvert(),
          "protected_values"_a.noconvert(), "out"_a.noconvert(), values_doc);
    m.def("values_of_levels", &values_of_levels<std::uint16_t>, "levels"_a.noconvert(), "table"_a.noconvert(),
          "protected_values"_a.noconvert(), "out"_a.noconvert(), values_doc);
    m.def("encode_levels", &encode_levels, "levels"_a.noconvert(), "parent"_a.noconvert(), "modulus"_a, "groups"_a,
          "run_length"_a,
          "Returns the coded levels (docs/format.md). parent: empty or as long as levels; groups: 1, or above every\n"
          "level of parent. ValueError: the arguments do not fit each other.");
    m.def("decode_levels", &decode_levels, "stream"_a, "parent"_a.noconvert(), "modulus"_a, "groups"_a,
          "levels"_a.noconvert(),
          "Fills levels from a stream of encode_levels with the same parent, modulus and groups.\n"
          "ValueError: the stream is damaged.");
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
    m.def("grid_fits", &grid_fits, "values"_a.noconvert(), "products"_a.noconvert(), "squares"_a.noconvert(),
          "inverses"_a.noconvert(), "fits"_a.noconvert(),
          "Fills four sums for each grid with step 1 / inverse: Σ r · product and Σ r² · square over the values that are\n"
          "rounded to the multiple r of the step; the same over the protected values, where r is the value.");
    m.def("update_fits", &update_fits, "firsts"_a.noconvert(), "seconds"_a.noconvert(), "epsilon"_a,
          "inverses"_a.noconvert(), "fits"_a.noconvert(),
          "Fills what grid_fits does for first moments in units of the roots of second moments, weighted as updates\n"
          "m / (sqrt(v) + epsilon) are. Returns the sum of the squares of updates and the largest magnitude of a first\n"
          "moment.");
    m.def("root_changes", &root_changes, "values"_a.noconvert(), "decoded"_a.noconvert(), "negligible"_a,
          "Returns of the values above zero, but for those that are negligible before and after: whether one is decoded\n"
          "to zero or infinity, the sum of (sqrt(value / decoded) - 1)², and how many there are.");
    m.def("matrix_magnitude", &matrix_magnitude, "row_sums"_a.noconvert(), "column_sums"_a.noconvert(),
          "Returns the mean square of a matrix without outliers, and the root mean square of its small rows or columns.\n"
          "row_sums, column_sums: of squares. ValueError: all are zero.");
    m.def("vector_magnitude", &vector_magnitude, "values"_a.noconvert(),
          "Returns the mean square of a vector without outliers, and its standard deviation. ValueError: all values are\n"
          "the same.");
    m.def("tensor_magnitude", &tensor_magnitude, "values"_a.noconvert(), "rows"_a,
          "Returns what matrix_magnitude or vector_magnitude does, of values row by row. None if all are the same or not\n"
          "finite, or if their squares could overflow or vanish. ValueError: no values, or not so many rows.");
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
    nb::class_<SmallMoments>(m, "SmallMoments", "Quantizes moments of small tensors, each in one call.")
        .def(nb::init<Table<const std::int16_t>, std::vector<int>, const Array<const std::int32_t>&,
                      const Array<const float>&>(),
             "positions"_a.noconvert(), "paces"_a, "rungs"_a.noconvert(), "inverses"_a.noconvert(),
             "positions: as for rank_one. paces: of the grids to try, coarsest first.")
        .def("second", &SmallMoments::second, "values"_a.noconvert(), "tolerance"_a, "negligible"_a, "rows"_a.noconvert(),
             "columns"_a.noconvert(), "levels"_a.noconvert(),
             "Fills rows and columns, and returns their bins; or fills levels, and returns their pace and bins; or\n"
             "returns None: store it exactly. rows, columns: empty if it is no matrix.")
        .def("first", &SmallMoments::first, "values"_a.noconvert(), "second"_a.noconvert(), "first_of_second"_a,
             "columns"_a.none().noconvert(), "first_of_columns"_a, "pace"_a, "tolerance"_a, "epsilon"_a,
             "zero"_a, "levels"_a.noconvert(),
             "Fills levels, and returns the rung that decodes them, and the highest level; None: store it exactly.\n"
             "second, columns: levels of the second moment's rows and columns, or of all values and None. zero: larger\n"
             "values may not be divided by zero.");
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
    m.def("errors", &errors, "values"_a.noconvert(), "exact"_a.noconvert(),
          "Returns the sums of the squares of exact values, and of the differences of the values from them.");
    m.def("extremes", &extremes, "values"_a.noconvert(),
          "Returns the lowest and the highest value; NaN twice if any value is NaN. ValueError: there are no values.");
    m.def("smallest_from", &smallest_from, "values"_a.noconvert(), "limit"_a,
          "Returns the smallest value that is at least the limit, which is above zero; infinity if there is none.");
    m.def("row_and_column_sums", &row_and_column_sums, "values"_a.noconvert(), "row_sums"_a.noconvert(),
          "column_sums"_a.noconvert(), "Fills the sums of the rows and columns of a matrix. values: row by row.");
    m.def("encode_conditional", &encode_conditional, "levels"_a.noconvert(), "parent"_a.noconvert(),
          "symbol_of"_a.noconvert(), "context_of"_a.noconvert(), "contexts"_a,
          "least_gain"_a.none() = nb::none(),
          "Returns the coded levels (docs/format.md). parent: empty or as long as levels; symbol_of: for each parent\n"
          "level a row with the symbol of each of 256 levels; context_of: the context of each parent level. None: the\n"
          "parent saves a smaller share of the bits than least_gain. ValueError: the arguments do not fit each other.");
    m.def("decode_conditional", &decode_conditional, "stream"_a, "parent"_a.noconvert(), "level_of"_a.noconvert(),
          "context_of"_a.noconvert(), "contexts"_a, "symbols"_a, "levels"_a.noconvert(),
          "Fills levels from a stream of encode_conditional with the same parent and contexts; level_of: for each\n"
          "parent level a row with the level of each of 256 symbols. ValueError: the stream is damaged.");
    m.def("nearest_levels", &nearest_levels, "positions"_a.noconvert(), "sources"_a.noconvert(), "is_parent"_a,
          "level_of"_a.noconvert(),
          "Fills, for each parent level, a row of 256 levels sorted by their distance (docs/format.md). positions,\n"
          "sources: the levels and the parent's levels on a line, float64. ValueError: wrong number, or not finite.");
    m.def("symbols_of_levels", &symbols_of_levels, "level_of"_a.noconvert(), "symbols"_a, "symbol_of"_a.noconvert(),
          "Inverts a table of nearest_levels. symbols: how many levels there are.");
    m.def("encode_lossless", &encode_lossless, "data"_a.noconvert(), "parent"_a.noconvert(), "itemsize"_a,
          "Returns the coded elements of 1, 2, 4 or 8 bytes (docs/format.md). parent: empty or as long as data.\n"
          "ValueError: the arguments do not fit each other.");
    m.def("decode_lossless", &decode_lossless, "stream"_a, "parent"_a.noconvert(), "itemsize"_a, "data"_a.noconvert(),
          "Fills data from a stream of encode_lossless with the same parent (or none, if the stream does not need it).\n"
          "ValueError: the stream is damaged.");
    m.def("decodes_to", &decodes_to, "stream"_a, "parent"_a.noconvert(), "itemsize"_a, "data"_a.noconvert(),
          "Returns whether decode_lossless would fill in these data. ValueError: as for decode_lossless.");
}
