// The inner loops of plane_rans, in plain C++ and with AVX2.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "plane_rans.hpp"

namespace dynaquant::plane_rans {

inline constexpr std::uint32_t probability_whole = 1u << probability_bits;
inline constexpr std::uint32_t lowest_state = 1u << 15;

// One of the 2048 slots of a class. From the lowest bit: 8 bits symbol, 12 bits position among the slots of the symbol,
// 12 bits frequency - 1.
using Slot = std::uint32_t;
using States = std::array<std::uint32_t, rans_states>;

constexpr Slot slot_of(std::uint32_t symbol, std::uint32_t frequency, std::uint32_t place) {
    return symbol | place << 8 | (frequency - 1) << 20;
}

// How the encoder changes a state for a symbol. It divides by the frequency with a multiplication, which is exact for
// states below 2^31. From the lowest bit, `rest` has 11 bits 2048 - frequency, 12 bits bias, 4 bits shift.
struct EncoderStep {
    std::uint32_t reciprocal;
    std::uint32_t rest;
};

constexpr EncoderStep step_of(std::uint32_t start, std::uint32_t frequency) {
    const std::uint32_t complement = probability_whole - frequency;
    // For a frequency of 1 the quotient is one too small. The bias corrects that.
    if (frequency == 1) return {~std::uint32_t{0}, complement | (start + complement) << 11};
    const auto width = static_cast<unsigned>(std::bit_width(frequency - 1));
    const std::uint64_t reciprocal = ((std::uint64_t{1} << (width + 31)) + frequency - 1) / frequency;
    return {static_cast<std::uint32_t>(reciprocal), complement | start << 11 | (width - 1) << 23};
}

// A symbol takes at most one word. AVX2 stores eight words at once; some of them may not count.
constexpr std::size_t room_for_words(std::size_t symbols) { return symbols + 8; }

// Encodes all symbols, the last one first. Stores words backwards from `end` and returns where they begin. classes: the
// class of every symbol, or null. The step of a symbol is at 256 * class + symbol.
std::uint16_t* encode_symbols(States& states, const EncoderStep* steps, const std::uint8_t* classes,
                              std::span<const std::uint8_t> symbols, std::uint16_t* end);

// The 16-bit words for the states. Never read past the end.
struct Words {
    const std::uint8_t* next;
    const std::uint8_t* end;
};

// Decodes all symbols. The 2048 slots of a class begin at 2048 * class. Throws std::invalid_argument if the words end
// too early.
void decode_symbols(States& states, Words& words, const Slot* slots, const Classes& classes,
                    std::span<std::uint8_t> symbols);

}  // namespace dynaquant::plane_rans
