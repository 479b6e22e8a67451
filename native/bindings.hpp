// What the parts of the Python module share: arrays of Python as spans, and the parts themselves.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "tables.hpp"

namespace nb = nanobind;

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

inline std::span<const std::uint8_t, 256> view(const Contexts& table) {
    return std::span<const std::uint8_t, 256>(table.data(), 256);
}

inline void check_same_size(std::size_t a, std::size_t b) {
    if (a != b) throw std::invalid_argument("arrays differ in size");
}

// Each adds functions to the module.
void bind_values(nb::module_& m);
void bind_moments(nb::module_& m);
void bind_coding(nb::module_& m);
