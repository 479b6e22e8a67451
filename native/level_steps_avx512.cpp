// The inner loops of level_rans with AVX-512: sixteen states in a vector.
#include <array>
#include <bit>
#include <cstddef>

#include "byte_table.hpp"
#include "level_steps.hpp"
#include "tables.hpp"

#ifdef DYNAQUANT_X86

namespace dynaquant::level_rans {
namespace {

constexpr unsigned lanes = 16;

DYNAQUANT_AVX512 inline __m128i load16(const std::uint8_t* bytes) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

// Bytes of a row of states: 16 or 32, in the low part of a register.
template <unsigned vectors>
DYNAQUANT_AVX512 inline __m512i load_row(const std::uint8_t* bytes) {
    if constexpr (vectors == 1) return _mm512_castsi128_si512(load16(bytes));
    return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
}

template <unsigned vectors>
DYNAQUANT_AVX512 inline void store_row(std::uint8_t* bytes, __m512i row) {
    if constexpr (vectors == 1)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm512_castsi512_si128(row));
    else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes), _mm512_castsi512_si256(row));
}

// Returns the bytes of a row that belong to the first or the second vector of states.
DYNAQUANT_AVX512 inline __m512i bytes_of(__m512i row, unsigned vector) {
    return _mm512_cvtepu8_epi32(vector == 0 ? _mm512_castsi512_si128(row) : _mm512_extracti32x4_epi32(row, 1));
}

// The same for numbers of 16 bits.
DYNAQUANT_AVX512 inline __m512i words_of(__m512i row, unsigned vector) {
    return _mm512_cvtepu16_epi32(vector == 0 ? _mm512_castsi512_si256(row) : _mm512_extracti64x4_epi64(row, 1));
}

DYNAQUANT_AVX512 inline __m512i low_bits(__m512i numbers) {
    return _mm512_and_si512(numbers, _mm512_set1_epi32(frequency_total - 1));
}

// Shifts a word into each state that is too low. Reads 32 bytes of words.
DYNAQUANT_AVX512 inline void refill(__m512i& state, const std::uint8_t*& words) {
    const __mmask16 needy = _mm512_cmplt_epu32_mask(state, _mm512_set1_epi32(lowest_state));
    const __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
    const __m512i taken = _mm512_maskz_expand_epi32(needy, next);
    state = _mm512_mask_or_epi32(state, needy, _mm512_slli_epi32(state, 16), taken);
    words += 2 * std::popcount(static_cast<unsigned>(needy));
}

// Moves each state on by a symbol with this frequency, whose slots begin so far before that of the state.
DYNAQUANT_AVX512 inline void advance(__m512i& state, __m512i frequency, __m512i offset, const std::uint8_t*& words) {
    const __m512i product = _mm512_mullo_epi32(frequency, _mm512_srli_epi32(state, frequency_bits));
    state = _mm512_add_epi32(product, offset);
    refill(state, words);
}

DYNAQUANT_AVX512 inline __m512i frequency_of(__m512i slot) {
    return _mm512_add_epi32(low_bits(_mm512_srli_epi32(slot, frequency_bits)), _mm512_set1_epi32(1));
}

// Decodes rows without a parent: one group, whose slots have the levels.
template <unsigned vectors>
DYNAQUANT_AVX512 std::size_t decode_alone(Decoding& block, std::span<std::uint8_t> levels, std::size_t begin) {
    constexpr std::size_t row = vectors * lanes;
    const Slot* const slots = block.table->slots.data();
    __m512i state[vectors];
    for (unsigned v = 0; v < vectors; ++v) state[v] = _mm512_loadu_si512(block.states.data() + v * lanes);
    const std::uint8_t* words = block.words;
    for (; levels.size() - begin >= row && block.readable - words >= std::ptrdiff_t{2 * row}; begin += row)
        for (unsigned v = 0; v < vectors; ++v) {
            const __m512i slot = _mm512_i32gather_epi32(low_bits(state[v]), slots, sizeof(Slot));
            advance(state[v], frequency_of(slot), low_bits(slot), words);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(levels.data() + begin + v * lanes),
                             _mm512_cvtepi32_epi8(_mm512_srli_epi32(slot, 24)));
        }
    for (unsigned v = 0; v < vectors; ++v) _mm512_storeu_si512(block.states.data() + v * lanes, state[v]);
    block.words = words;
    return begin;
}

// What a DecoderTable says of the near symbols after each parent level, in registers. The slots of many groups do not fit
// into the fast caches, and gather instructions are slow on many processors.
class NearSymbols {
public:
    DYNAQUANT_AVX512 explicit NearSymbols(const DecoderTable& table) : group_(byte_table(table.group)) {
        std::array<std::uint8_t, parent_levels> low, high;
        for (std::size_t s = 0; s < near_symbols; ++s) {
            for (std::size_t i = 0; i < parent_levels; ++i) {
                low[i] = static_cast<std::uint8_t>(table.ends[s][i]);
                high[i] = static_cast<std::uint8_t>(table.ends[s][i] >> 8);
            }
            low_[s] = byte_table(low);
            high_[s] = byte_table(high);
            levels_[s] = byte_table(table.near[s]);
        }
    }
    // Returns where the slots of a symbol end, in 16 bits for each of 32 parent levels.
    DYNAQUANT_AVX512 __m512i ends(std::size_t symbol, __m512i parent) const {
        const __m256i low = _mm512_castsi512_si256(look_up(low_[symbol], parent));
        const __m256i high = _mm512_castsi512_si256(look_up(high_[symbol], parent));
        return _mm512_or_si512(_mm512_cvtepu8_epi16(low), _mm512_slli_epi16(_mm512_cvtepu8_epi16(high), 8));
    }
    DYNAQUANT_AVX512 __m512i levels(std::size_t symbol, __m512i parent) const {
        return look_up(levels_[symbol], parent);
    }
    DYNAQUANT_AVX512 __m512i groups(__m512i parent) const { return look_up(group_, parent); }

private:
    ByteTable group_, low_[near_symbols], high_[near_symbols], levels_[near_symbols];
};

// The same for few parent levels.
class NearSymbolsOfFew {
public:
    static constexpr std::uint8_t highest = 63;

    DYNAQUANT_AVX512 explicit NearSymbolsOfFew(const DecoderTable& table)
        : group_(_mm512_loadu_si512(table.group.data())) {
        for (std::size_t s = 0; s < near_symbols; ++s) {
            ends_[s][0] = _mm512_loadu_si512(table.ends[s].data());
            ends_[s][1] = _mm512_loadu_si512(table.ends[s].data() + 2 * lanes);
            levels_[s] = _mm512_loadu_si512(table.near[s].data());
        }
    }
    DYNAQUANT_AVX512 __m512i ends(std::size_t symbol, __m512i parent) const {
        const __m512i index = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(parent));
        return _mm512_permutex2var_epi16(ends_[symbol][0], index, ends_[symbol][1]);
    }
    DYNAQUANT_AVX512 __m512i levels(std::size_t symbol, __m512i parent) const {
        return _mm512_permutexvar_epi8(parent, levels_[symbol]);
    }
    DYNAQUANT_AVX512 __m512i groups(__m512i parent) const { return _mm512_permutexvar_epi8(parent, group_); }

private:
    __m512i group_, ends_[near_symbols][2], levels_[near_symbols];
};

// Decodes rows with a parent. A state shows the near symbols without a look-up in memory. Others, which are rare, are
// looked up there.
template <unsigned vectors, class Near>
DYNAQUANT_AVX512 std::size_t decode_given(Decoding& block, std::span<std::uint8_t> levels, std::size_t begin) {
    constexpr std::size_t row = vectors * lanes;
    const DecoderTable& table = *block.table;
    const Near near(table);
    __m512i state[vectors];
    for (unsigned v = 0; v < vectors; ++v) state[v] = _mm512_loadu_si512(block.states.data() + v * lanes);
    const std::uint8_t* words = block.words;
    for (; levels.size() - begin >= row && block.readable - words >= std::ptrdiff_t{2 * row}; begin += row) {
        std::uint8_t* const out = levels.data() + begin;
        const __m512i parent = load_row<vectors>(block.parent + begin);
        const __m512i ends[] = {near.ends(0, parent), near.ends(1, parent), near.ends(2, parent)};
        __m512i place[vectors], frequency[vectors], offset[vectors];
        __mmask16 others[vectors];
        __mmask64 is_1_or_more = 0, is_2_or_more = 0;
        unsigned any = 0;
        for (unsigned v = 0; v < vectors; ++v) {
            const __m512i end_0 = words_of(ends[0], v), end_1 = words_of(ends[1], v), end_2 = words_of(ends[2], v);
            place[v] = low_bits(state[v]);
            const __mmask16 past_0 = _mm512_cmpge_epu32_mask(place[v], end_0);
            const __mmask16 past_1 = _mm512_cmpge_epu32_mask(place[v], end_1);
            any |= others[v] = _mm512_cmpge_epu32_mask(place[v], end_2);
            __m512i start = _mm512_maskz_mov_epi32(past_0, end_0), end = _mm512_mask_mov_epi32(end_0, past_0, end_1);
            start = _mm512_mask_mov_epi32(start, past_1, end_1);
            end = _mm512_mask_mov_epi32(end, past_1, end_2);
            frequency[v] = _mm512_sub_epi32(end, start);
            offset[v] = _mm512_sub_epi32(place[v], start);
            is_1_or_more |= __mmask64{past_0} << lanes * v;
            is_2_or_more |= __mmask64{past_1} << lanes * v;
        }
        __m512i level = near.levels(0, parent);
        level = _mm512_mask_mov_epi8(level, is_1_or_more, near.levels(1, parent));
        level = _mm512_mask_mov_epi8(level, is_2_or_more, near.levels(2, parent));
        if (any == 0) {
            for (unsigned v = 0; v < vectors; ++v) advance(state[v], frequency[v], offset[v], words);
            store_row<vectors>(out, level);
            continue;
        }
        const __m512i group = near.groups(parent);
        for (unsigned v = 0; v < vectors; ++v) {
            const __m512i index = _mm512_or_si512(place[v], _mm512_slli_epi32(bytes_of(group, v), frequency_bits));
            const __m512i slot = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), others[v], index,
                                                             table.slots.data(), sizeof(Slot));
            frequency[v] = _mm512_mask_mov_epi32(frequency[v], others[v], frequency_of(slot));
            offset[v] = _mm512_mask_mov_epi32(offset[v], others[v], low_bits(slot));
            advance(state[v], frequency[v], offset[v], words);
            const __m512i pair = _mm512_or_si512(_mm512_slli_epi32(bytes_of(parent, v), 8), _mm512_srli_epi32(slot, 24));
            const __m512i found = _mm512_mask_i32gather_epi32(bytes_of(level, v), others[v], pair, table.level_of, 1);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + v * lanes), _mm512_cvtepi32_epi8(found));  // its low byte
        }
    }
    for (unsigned v = 0; v < vectors; ++v) _mm512_storeu_si512(block.states.data() + v * lanes, state[v]);
    block.words = words;
    return begin;
}

// The steps of sixteen levels.
struct Steps {
    __m512i reciprocal, rest;
};

// Returns the steps of sixteen pairs of a parent's level and a level. Scalar look-ups: gather instructions do the same,
// but are slower on many processors.
DYNAQUANT_AVX512 inline Steps steps_of(const EncoderTable& table, __m512i pairs) {
    alignas(64) std::array<std::uint32_t, lanes> at;
    _mm512_store_si512(at.data(), pairs);
    const auto step = [&](unsigned lane) { return std::bit_cast<long long>(table.steps[at[lane]]); };
    const __m512i first = _mm512_setr_epi64(step(0), step(1), step(2), step(3), step(4), step(5), step(6), step(7));
    const __m512i second =
        _mm512_setr_epi64(step(8), step(9), step(10), step(11), step(12), step(13), step(14), step(15));
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return {_mm512_permutex2var_epi32(first, even, second), _mm512_permutex2var_epi32(first, odd, second)};
}

// Encodes one level with each of sixteen states. Writes words backwards from `words`.
DYNAQUANT_AVX512 inline void encode_step(__m512i& state, std::uint16_t*& words, const Steps& steps) {
    const __m512i whole = _mm512_set1_epi32(frequency_total);
    const __m512i complement = low_bits(steps.rest);

    // A state is full if its highest 12 bits are not below the frequency.
    const __m512i high_bits = _mm512_srli_epi32(state, 32 - frequency_bits);
    const __mmask16 full = _mm512_cmpge_epu32_mask(_mm512_add_epi32(high_bits, complement), whole);
    const auto count = static_cast<unsigned>(std::popcount(static_cast<unsigned>(full)));
    words -= count;
    _mm256_mask_storeu_epi16(words, static_cast<__mmask16>((1u << count) - 1),
                             _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, state)));
    state = _mm512_mask_srli_epi32(state, full, state, 16);

    const __m512i rounded = _mm512_add_epi32(state, _mm512_srli_epi32(steps.rest, 29));
    const __m512i even = _mm512_mul_epu32(rounded, steps.reciprocal);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(rounded, 32), _mm512_srli_epi64(steps.reciprocal, 32));
    const __m512i high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
    const __m512i shift = _mm512_and_si512(_mm512_srli_epi32(steps.rest, 25), _mm512_set1_epi32(0xF));
    const __m512i bias = _mm512_and_si512(_mm512_srli_epi32(steps.rest, 12), _mm512_set1_epi32(0x1FFF));
    const __m512i quotient = _mm512_srlv_epi32(high, shift);
    state = _mm512_add_epi32(_mm512_add_epi32(state, bias), _mm512_mullo_epi32(quotient, complement));
}

template <unsigned vectors, bool with_parent>
DYNAQUANT_AVX512 void encode_rows(Encoding& block, std::span<const std::uint8_t> levels) {
    constexpr std::size_t row = vectors * lanes;
    const __m256i columns = _mm256_set1_epi16(static_cast<short>(block.table->columns));
    __m512i state[vectors];
    for (unsigned v = 0; v < vectors; ++v) state[v] = _mm512_loadu_si512(block.states.data() + v * lanes);
    std::uint16_t* words = block.words;
    for (std::size_t end = levels.size(); end > 0; end -= row)
        for (unsigned v = vectors; v-- > 0;) {
            const std::size_t i = end - row + v * lanes;
            __m256i pair = _mm256_cvtepu8_epi16(load16(levels.data() + i));
            if constexpr (with_parent) {
                const __m256i parent = _mm256_cvtepu8_epi16(load16(block.parent + i));
                pair = _mm256_add_epi16(pair, _mm256_mullo_epi16(parent, columns));
            }
            encode_step(state[v], words, steps_of(*block.table, _mm512_cvtepu16_epi32(pair)));
        }
    for (unsigned v = 0; v < vectors; ++v) _mm512_storeu_si512(block.states.data() + v * lanes, state[v]);
    block.words = words;
}

template <unsigned vectors>
constexpr auto encode_with = std::array{encode_rows<vectors, false>, encode_rows<vectors, true>};

}  // namespace

std::size_t decode_rows_avx512(Decoding& block, unsigned states, std::span<std::uint8_t> levels, std::size_t begin) {
    if (block.parent == nullptr)
        return states == 32 ? decode_alone<2>(block, levels, begin) : decode_alone<1>(block, levels, begin);
    const std::uint8_t highest = highest_of({block.parent + begin, levels.size() - begin});
    if (highest <= NearSymbolsOfFew::highest)
        return states == 32 ? decode_given<2, NearSymbolsOfFew>(block, levels, begin)
                            : decode_given<1, NearSymbolsOfFew>(block, levels, begin);
    return states == 32 ? decode_given<2, NearSymbols>(block, levels, begin)
                        : decode_given<1, NearSymbols>(block, levels, begin);
}

void encode_rows_avx512(Encoding& block, unsigned states, std::span<const std::uint8_t> levels) {
    (states == 32 ? encode_with<2> : encode_with<1>)[block.parent != nullptr](block, levels);
}

}  // namespace dynaquant::level_rans

#endif
