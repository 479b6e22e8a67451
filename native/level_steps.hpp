// The inner loops of level_rans, for each set of instructions. All give the same levels and the same bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu.hpp"
#include "level_rans.hpp"

namespace dynaquant::level_rans {

using States = std::array<std::uint32_t, most_states>;

// A block while it is coded.
struct Decoding {
    States states;
    const std::uint8_t* words;     // the next word
    const std::uint8_t* readable;  // the end of the words; with zeros behind them, the end of the zeros
    const std::uint8_t* parent;
    const DecoderTable* table;
};

struct Encoding {
    States states;
    std::uint16_t* words;  // the word written last
    const std::uint8_t* parent;
    const EncoderTable* table;
};

// Decode rows of levels from `begin` on, one level for each state, as long as all words that a row could take are
// readable. Return how many levels are decoded then. states: a multiple of 8; of 16 for AVX-512. Here and below, only
// functions for this kind of processor are defined.
std::size_t decode_rows_avx2(Decoding& block, unsigned states, std::span<std::uint8_t> levels, std::size_t begin);
std::size_t decode_rows_avx512(Decoding& block, unsigned states, std::span<std::uint8_t> levels, std::size_t begin);
std::size_t decode_rows_neon(Decoding& block, unsigned states, std::span<std::uint8_t> levels, std::size_t begin);

// Encode rows of levels, the last one first. levels: a multiple of the number of states.
void encode_rows_avx2(Encoding& block, unsigned states, std::span<const std::uint8_t> levels);
void encode_rows_avx512(Encoding& block, unsigned states, std::span<const std::uint8_t> levels);
void encode_rows_neon(Encoding& block, unsigned states, std::span<const std::uint8_t> levels);

}  // namespace dynaquant::level_rans
