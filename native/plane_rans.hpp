// The entropy coder of byte planes: order-0 rANS with 32 interleaved states. Every byte has a class, and every class
// has its own frequency table. (level_rans is the other one: fewer states and frequencies of 12 bits, for levels.)
//
// Note: the encoder runs backwards, the decoder forwards. Symbol i belongs to state i mod 32. All states share
// one sequence of 16-bit words. States are in [2^15, 2^31): if a state falls below 2^15, a decoder shifts in the next
// word. (As in CRAM 3.1's rANS Nx16; Duda 2013, Giesen 2014.)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bits.hpp"

namespace dynaquant::plane_rans {

inline constexpr unsigned probability_bits = 11;
inline constexpr std::size_t rans_states = 32;
inline constexpr std::size_t byte_values = 256;
inline constexpr std::size_t class_count = 8;

// Returns the class of a size: 0 for `top` and more, 1 for one less, and so on; the last class has all small sizes.
constexpr std::uint8_t class_of(int top, int size) {
    const int below = top - size;
    return static_cast<std::uint8_t>(below < 0 ? 0 : below >= int{class_count} ? int{class_count} - 1 : below);
}

using Counts = std::array<std::uint32_t, byte_values>;
// The frequencies of the byte values. They add up to 2048, or are all zero for a class without symbols.
using Frequencies = std::array<std::uint16_t, byte_values>;

// Returns frequencies proportional to the counts, at least 1 for each byte that occurs. The counts are at most 2^20 in
// all.
Frequencies frequencies_of(const Counts& counts);

// Returns the fewest bytes that symbols with these counts can take (their entropy), and about how many bytes they take
// with their table.
double information(const Counts& counts);
std::size_t coded_size(const Counts& counts);

// How a decoder knows the class of a symbol.
struct Classes {
    enum Kind { one, given, by_previous } kind = one;
    // given: the class of each symbol, below class_count.
    const std::uint8_t* of_symbol = nullptr;
    // by_previous: the class of a symbol is class_of(top, the symbol 32 before it); the first 32 have class 0.
    std::uint8_t top = 0;
};

// Computes the classes of Classes::by_previous.
void classify_by_previous(std::span<const std::uint8_t> symbols, std::uint8_t top, std::uint8_t* classes);

// Memory to reuse in the next call.
struct RansScratch {
    std::vector<std::uint16_t> words;
    std::vector<std::uint32_t> slots;
};

// Appends tables, states and words for the symbols. classes: for each symbol the index of its table, or empty if all
// are class 0. Every symbol must have a frequency in the table of its class.
void encode_plane(std::span<const std::uint8_t> symbols, std::span<const std::uint8_t> classes,
                  std::span<const Frequencies> tables, RansScratch& scratch, std::vector<std::uint8_t>& out);

// The inverse: fills symbols and removes the bytes that it has read from the front of `in`. Throws
// std::invalid_argument if encode_plane cannot have written these bytes.
void decode_plane(std::span<const std::uint8_t>& in, const Classes& classes, RansScratch& scratch,
                  std::span<std::uint8_t> symbols);

}  // namespace dynaquant::plane_rans
