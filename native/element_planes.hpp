// Splits the elements of a block into byte planes and joins them again: the values, or their differences from the
// parent's. These loops touch every byte of a tensor, so they are written for compilers to vectorise.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu.hpp"
#include "plane_rans.hpp"

namespace dynaquant {

template <class U>
inline constexpr unsigned bits_of = 8 * sizeof(U);

// Elements may be at any address, also an unaligned one.
template <class U>
[[gnu::always_inline]] inline U load(const std::uint8_t* bytes, std::size_t i) {
    U value;
    std::memcpy(&value, bytes + i * sizeof(U), sizeof(U));
    return value;
}

// The sign bit follows the 16 highest bits of the magnitude. Entropy coding mostly reduces these planes, and one sign
// is often more likely than the other. In elements of 16 bits or less the sign bit comes last.
template <class U>
inline constexpr unsigned sign_place = bits_of<U> <= 16 ? 0 : bits_of<U> - 16;

// magnitude: its highest bit is zero. sign: 0 or 1.
template <class U>
[[gnu::always_inline]] inline U with_sign(U magnitude, U sign) {
    constexpr U below = static_cast<U>((U{1} << sign_place<U>) - 1);
    return static_cast<U>((magnitude & static_cast<U>(~below)) << 1 | sign << sign_place<U> | (magnitude & below));
}

template <class U>
[[gnu::always_inline]] inline U sign_of(U folded) {
    return static_cast<U>(folded >> sign_place<U> & 1);
}

template <class U>
[[gnu::always_inline]] inline U magnitude_of(U folded) {
    constexpr U below = static_cast<U>((U{1} << sign_place<U>) - 1);
    return static_cast<U>((folded >> 1 & static_cast<U>(~below)) | (folded & below));
}

// Folds the value of a float: the exponent first.
template <class U>
[[gnu::always_inline]] inline U fold(U value) {
    constexpr U magnitude = static_cast<U>(~U{0}) >> 1;
    return with_sign<U>(value & magnitude, static_cast<U>(value >> (bits_of<U> - 1)));
}

template <class U>
[[gnu::always_inline]] inline U unfold(U folded) {
    return static_cast<U>(magnitude_of(folded) | sign_of(folded) << (bits_of<U> - 1));
}

// Folds the difference from the parent's element, as signed integers: 0, -1, 1, -2, … have magnitudes 0, 0, 1, 1, …
template <class U>
[[gnu::always_inline]] inline U fold(U value, U parent) {
    const auto d = static_cast<U>(value - parent);
    const auto sign = static_cast<U>(d >> (bits_of<U> - 1));
    return with_sign<U>(static_cast<U>(d ^ static_cast<U>(0 - sign)), sign);
}

template <class U>
[[gnu::always_inline]] inline U unfold(U folded, U parent) {
    return static_cast<U>(parent + static_cast<U>(magnitude_of(folded) ^ static_cast<U>(0 - sign_of(folded))));
}

// Returns the folded element, which is then split into bytes.
template <class U>
[[gnu::always_inline]] inline U folded(const std::uint8_t* values, const std::uint8_t* parent, std::size_t i) {
    const U value = load<U>(values, i);
    return parent == nullptr ? fold(value) : fold(value, load<U>(parent, i));
}

template <class U>
using Planes = std::array<std::uint8_t*, sizeof(U)>;
template <class U>
using ConstPlanes = std::array<const std::uint8_t*, sizeof(U)>;

// Writes byte k of all elements to planes[k]; byte 0 is the highest. parent: the parent's elements, or null.
template <class U>
[[gnu::always_inline]] inline void split_loop(const std::uint8_t* values, const std::uint8_t* parent,
                                              std::size_t count, const Planes<U>& planes) {
    constexpr std::size_t chunk = 512;
    std::array<U, chunk> whole;
    for (std::size_t begin = 0; begin < count; begin += chunk) {
        const std::size_t length = std::min(chunk, count - begin);
        if (parent == nullptr)
            for (std::size_t i = 0; i < length; ++i) whole[i] = fold(load<U>(values, begin + i));
        else
            for (std::size_t i = 0; i < length; ++i)
                whole[i] = fold(load<U>(values, begin + i), load<U>(parent, begin + i));
        for (std::size_t k = 0; k < sizeof(U); ++k) {
            std::uint8_t* const out = planes[k] + begin;
            const unsigned shift = bits_of<U> - 8 - 8 * static_cast<unsigned>(k);
            for (std::size_t i = 0; i < length; ++i) out[i] = static_cast<std::uint8_t>(whole[i] >> shift);
        }
    }
}

template <class U>
[[gnu::always_inline]] inline void join_loop(const ConstPlanes<U>& planes, const std::uint8_t* parent,
                                             std::size_t count, std::uint8_t* values) {
    constexpr std::size_t chunk = 512;
    std::array<U, chunk> whole;
    for (std::size_t begin = 0; begin < count; begin += chunk) {
        const std::size_t length = std::min(chunk, count - begin);
        for (std::size_t i = 0; i < length; ++i) {
            U element = 0;
            for (std::size_t k = 0; k < sizeof(U); ++k)
                element = static_cast<U>(element | static_cast<U>(planes[k][begin + i])
                                                       << (bits_of<U> - 8 - 8 * static_cast<unsigned>(k)));
            whole[i] = element;
        }
        if (parent == nullptr)
            for (std::size_t i = 0; i < length; ++i) whole[i] = unfold(whole[i]);
        else
            for (std::size_t i = 0; i < length; ++i) whole[i] = unfold(whole[i], load<U>(parent, begin + i));
        std::memcpy(values + begin * sizeof(U), whole.data(), length * sizeof(U));
    }
}

// Returns the exponent of a float32, bfloat16 or float64; for other types the highest bits below the sign.
template <class U>
[[gnu::always_inline]] inline unsigned exponent_of(U value) {
    constexpr unsigned exponent_bits = sizeof(U) == 8 ? 11 : 8;
    return static_cast<unsigned>(static_cast<U>(value << 1) >> (bits_of<U> - exponent_bits));
}

// Computes the class of each element from the exponent of the parent's element.
template <class U>
[[gnu::always_inline]] inline void classes_loop(const std::uint8_t* parent, std::size_t count, unsigned top,
                                                std::uint8_t* classes) {
    for (std::size_t i = 0; i < count; ++i)
        classes[i] = plane_rans::class_of(static_cast<int>(top), static_cast<int>(exponent_of(load<U>(parent, i))));
}

template <class U>
void split(const std::uint8_t* values, const std::uint8_t* parent, std::size_t count, const Planes<U>& planes) {
    with_widest([&]() DYNAQUANT_INLINED { split_loop<U>(values, parent, count, planes); });
}

// The inverse of split.
template <class U>
void join(const ConstPlanes<U>& planes, const std::uint8_t* parent, std::size_t count, std::uint8_t* values) {
    with_widest([&]() DYNAQUANT_INLINED { join_loop<U>(planes, parent, count, values); });
}

template <class U>
void classify(const std::uint8_t* parent, std::size_t count, unsigned top, std::uint8_t* classes) {
    with_widest([&]() DYNAQUANT_INLINED { classes_loop<U>(parent, count, top, classes); });
}

}  // namespace dynaquant
