// The entropy coder of levels: interleaved range asymmetric numeral systems (rANS, Duda 2013), with 32-bit states,
// 16-bit words and 12-bit frequencies. (plane_rans is the other one: frequencies of 11 bits, for byte planes.)
//
// Note: rANS is last in, first out. The encoder takes the values from the last to the first and writes words
// backwards from the end of its buffer; the decoder reads both forwards. Value i belongs to state i % states, so that a
// decoder has several independent chains of work. Between values a state is in [2^16, 2^32). If a value takes it below,
// a decoder shifts in the next word.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dynaquant::level_rans {

inline constexpr unsigned frequency_bits = 12;
inline constexpr std::uint32_t frequency_total = 1u << frequency_bits;
inline constexpr std::uint32_t lowest_state = 1u << 16;
inline constexpr unsigned most_states = 32;
inline constexpr std::size_t parent_levels = 256;
inline constexpr std::size_t near_symbols = 3;

// What a decoder needs for one of the 4096 slots: 8 bits symbol, 12 bits frequency - 1, 12 bits slot - begin.
using Slot = std::uint32_t;

constexpr Slot slot_of(std::uint32_t symbol, std::uint32_t frequency, std::uint32_t offset) {
    return symbol << 24 | (frequency - 1) << 12 | offset;
}

// How an encoder changes a state for a symbol that has `frequency` of the 4096 slots, from slot `begin` on. It divides
// by the frequency with a multiplication: (state + round) * reciprocal >> (32 + shift), which is exact for every state
// that may be divided (Robison 2005). From the lowest bit, `rest` has 12 bits 4096 - frequency, 13 bits bias, 4 bits
// shift, 1 bit round.
struct EncoderStep {
    std::uint32_t reciprocal;
    std::uint32_t rest;

    constexpr std::uint32_t complement() const { return rest & (frequency_total - 1); }
    // Whether a state is so large that a word has to be written first. Else it would grow beyond 32 bits.
    constexpr bool is_full(std::uint32_t state) const {
        return state >> (32 - frequency_bits) >= frequency_total - complement();
    }
    // (state / frequency) * 4096 + state % frequency + begin
    constexpr std::uint32_t push(std::uint32_t state) const {
        const std::uint64_t product = std::uint64_t{state + (rest >> 29)} * reciprocal;
        const auto quotient = static_cast<std::uint32_t>(product >> 32 >> (rest >> 25 & 0xF));
        return state + (rest >> 12 & 0x1FFF) + quotient * complement();
    }
};

constexpr EncoderStep step_of(std::uint32_t begin, std::uint32_t frequency) {
    const std::uint32_t complement = frequency_total - frequency;
    // The quotient by 1 comes out one too small. The bias corrects that.
    if (frequency == 1) return {~std::uint32_t{0}, complement | (begin + complement) << 12};
    const auto shift = static_cast<unsigned>(std::bit_width(frequency) - 1);
    if (std::has_single_bit(frequency)) return {1u << 31, complement | begin << 12 | (shift - 1) << 25};
    const std::uint64_t dividend = std::uint64_t{1} << (32 + shift);
    const auto reciprocal = static_cast<std::uint32_t>(dividend / frequency);
    // How far the reciprocal is too small. One more is near enough, or one more state is.
    const bool up = frequency - dividend % frequency <= 1u << shift;
    return {up ? reciprocal + 1 : reciprocal, complement | begin << 12 | shift << 25 | (up ? 0u : 1u << 29)};
}

// For an encoder: the steps of all pairs of a parent's level and a level.
struct EncoderTable {
    std::size_t columns = 0;             // more than the highest level
    std::span<const EncoderStep> steps;  // at parent level * columns + level; not owned
};

// For a decoder: what every parent level means for the next level.
struct DecoderTable {
    std::vector<Slot> slots;                        // 4096 for each group; without a parent, a level for the symbol
    std::array<std::uint8_t, parent_levels> group;  // of each parent level
    const std::uint8_t* level_of;  // at parent level << 8 | symbol. Of 8 states or more, three more bytes are readable
    // For each parent level, of the symbols 0, 1 and 2, which are the levels nearest to it: these levels, and the ends of
    // their slots.
    std::array<std::array<std::uint8_t, parent_levels>, near_symbols> near;
    std::array<std::array<std::uint16_t, parent_levels>, near_symbols> ends;

    const Slot* slots_of(std::uint8_t source) const { return slots.data() + group[source] * frequency_total; }
};

// Appends states and words of a block. parent: as many levels, or null if all are 0. states: 1 to 32, a power of two.
void encode_block(std::span<const std::uint8_t> levels, const std::uint8_t* parent, const EncoderTable& table,
                  unsigned states, std::vector<std::uint8_t>& out);

// The inverse. Throws std::invalid_argument if encode_block cannot have written the block.
void decode_block(std::span<const std::uint8_t> block, const std::uint8_t* parent, const DecoderTable& table,
                  unsigned states, std::span<std::uint8_t> levels);

}  // namespace dynaquant::level_rans
