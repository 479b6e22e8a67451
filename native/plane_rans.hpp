// Order-0 entropy coding of one plane of bytes, each under the statistics of its class: 32 interleaved rANS states.
//
// What would surprise: the encoder runs backwards and the decoder forwards. Symbol i belongs to state i mod 32, and all
// states share one sequence of 16-bit words. States lie in [2^15, 2^31); a decoder refills a state that has fallen
// below 2^15 with the next word. (As in CRAM 3.1's rANS Nx16; Duda 2013, Giesen 2014.)
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

// The class of what has this size: 0 for `top` and more, the last for all that is small.
constexpr std::uint8_t class_of(int top, int size) {
    const int below = top - size;
    return static_cast<std::uint8_t>(below < 0 ? 0 : below >= int{class_count} ? int{class_count} - 1 : below);
}

using Counts = std::array<std::uint32_t, byte_values>;
// How often each byte is expected in 2048 symbols: they add up to 2048, or are all zero for a class without symbols.
using Frequencies = std::array<std::uint16_t, byte_values>;

// Frequencies near the counts, none zero that was not, for counts of at most 2^20 symbols together.
Frequencies frequencies_of(const Counts& counts);

// The bytes that symbols with these counts take at the least, and about how many they take with their table.
double information(const Counts& counts);
std::size_t coded_size(const Counts& counts);

// What tells a decoder the class of a symbol.
struct Classes {
    enum Kind { one, given, by_previous } kind = one;
    const std::uint8_t* of_symbol = nullptr;  // given: each symbol's class, below class_count
    std::uint8_t top = 0;                     // by_previous: for class_of the symbol 32 places before; 0 without such
};

// The classes that by_previous stands for.
void classify_by_previous(std::span<const std::uint8_t> symbols, std::uint8_t top, std::uint8_t* classes);

// Memory that calls reuse.
struct RansScratch {
    std::vector<std::uint16_t> words;
    std::vector<std::uint32_t> slots;
};

// Appends tables, states and words for the symbols. classes: empty (all are class 0), or the index into tables for each
// symbol. Every symbol must have a frequency in the table of its class.
void encode_plane(std::span<const std::uint8_t> symbols, std::span<const std::uint8_t> classes,
                  std::span<const Frequencies> tables, RansScratch& scratch, std::vector<std::uint8_t>& out);

// The inverse: fills symbols, and cuts what it has read off the front of `in`. Throws std::invalid_argument when the
// bytes are not what encode_plane would have written.
void decode_plane(std::span<const std::uint8_t>& in, const Classes& classes, RansScratch& scratch,
                  std::span<std::uint8_t> symbols);

}  // namespace dynaquant::plane_rans
