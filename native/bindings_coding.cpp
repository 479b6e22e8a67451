// Coding and decoding for Python.
#include "bindings.hpp"

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "conditional.hpp"
#include "levels.hpp"
#include "lossless.hpp"
#include "nearest.hpp"

namespace {

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

}  // namespace

void bind_coding(nb::module_& m) {
    using nb::literals::operator""_a;
    m.def("encode_levels", &encode_levels, "levels"_a.noconvert(), "parent"_a.noconvert(), "modulus"_a, "groups"_a,
          "run_length"_a,
          "Returns the coded levels (docs/format.md). parent: empty or as long as levels; groups: 1, or above every\n"
          "level of parent. ValueError: the arguments do not fit each other.");
    m.def("decode_levels", &decode_levels, "stream"_a, "parent"_a.noconvert(), "modulus"_a, "groups"_a,
          "levels"_a.noconvert(),
          "Fills levels from a stream of encode_levels with the same parent, modulus and groups.\n"
          "ValueError: the stream is damaged.");
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
