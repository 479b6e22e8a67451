// The inner loops of rANS, plain and with AVX2.
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

// From the lowest bit up: 8 bits symbol, 12 bits place among the symbol's slots, 12 bits frequency less one.
using Slot = std::uint32_t;
using States = std::array<std::uint32_t, rans_states>;

constexpr Slot slot_of(std::uint32_t symbol, std::uint32_t frequency, std::uint32_t place) {
    return symbol | place << 8 | (frequency - 1) << 20;
}

// What the encoder does to a state for a symbol. The division by its frequency is a multiplication, exact for states
// below 2^31. From the lowest bit up, `rest` is: 11 bits 2048 less the frequency, 12 bits bias, 4 bits shift.
struct EncoderStep {
    std::uint32_t reciprocal;
    std::uint32_t rest;
};

constexpr EncoderStep step_of(std::uint32_t start, std::uint32_t frequency) {
    const std::uint32_t complement = probability_whole - frequency;
    // The quotient by 1 comes out one too small, which the bias makes up for.
    if (frequency == 1) return {~std::uint32_t{0}, complement | (start + complement) << 11};
    const auto width = static_cast<unsigned>(std::bit_width(frequency - 1));
    const std::uint64_t reciprocal = ((std::uint64_t{1} << (width + 31)) + frequency - 1) / frequency;
    return {static_cast<std::uint32_t>(reciprocal), complement | start << 11 | (width - 1) << 23};
}

// A symbol gives up one word at most; eight are stored before it is clear how many of them count.
constexpr std::size_t room_for_words(std::size_t symbols) { return symbols + 8; }

// Encodes all symbols, the last one first. Words are stored backwards from `end`; returns where they begin. classes:
// null, or the class of every symbol, whose steps are 256 * class + symbol.
std::uint16_t* encode_symbols(States& states, const EncoderStep* steps, const std::uint8_t* classes,
                              std::span<const std::uint8_t> symbols, std::uint16_t* end);

// The 16-bit words that refill states; never read past the end.
struct Words {
    const std::uint8_t* next;
    const std::uint8_t* end;
};

// Decodes all symbols. The slots of a class are 2048 from 2048 * class on. Throws std::invalid_argument when the words
// end too early.
void decode_symbols(States& states, Words& words, const Slot* slots, const Classes& classes,
                    std::span<std::uint8_t> symbols);

}  // namespace dynaquant::plane_rans
