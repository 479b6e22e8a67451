// The inner loops of level_rans with AVX-512: sixteen states in a vector.
#include <array>
#include <bit>
#include <cstddef>

#include "byte_table.hpp"
#include "level_steps.hpp"

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
DYNAQUANT_AVX512 inline __m512i of_vector(__m512i row, unsigned vector) {
    return _mm512_cvtepu8_epi32(vector == 0 ? _mm512_castsi512_si128(row) : _mm512_extracti32x4_epi32(row, 1));
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

// Decodes rows with a parent. Symbol 0, the level nearest to the parent's, mostly is the most frequent one. It has the
// first slots of its group, so a state shows it without a look-up in memory. Only other symbols are looked up: the slots
// of many groups do not fit into the fast caches.
template <unsigned vectors>
DYNAQUANT_AVX512 std::size_t decode_given(Decoding& block, std::span<std::uint8_t> levels, std::size_t begin) {
    constexpr std::size_t row = vectors * lanes;
    const DecoderTable& table = *block.table;
    const Slot* const slots = table.slots.data();
    const std::uint8_t* const level_of = table.level_of;
    const ByteTable group_of = byte_table(table.group), first_of = byte_table(table.first);
    const ByteTable low_of = byte_table(table.first_low), high_of = byte_table(table.first_high);
    __m512i state[vectors];
    for (unsigned v = 0; v < vectors; ++v) state[v] = _mm512_loadu_si512(block.states.data() + v * lanes);
    const std::uint8_t* words = block.words;
    for (; levels.size() - begin >= row && block.readable - words >= std::ptrdiff_t{2 * row}; begin += row) {
        std::uint8_t* const out = levels.data() + begin;
        const __m512i parent = load_row<vectors>(block.parent + begin), first = look_up(first_of, parent);
        const __m512i low = look_up(low_of, parent), high = look_up(high_of, parent);
        __m512i frequency[vectors], offset[vectors];
        __mmask16 others[vectors];
        unsigned any = 0;
        for (unsigned v = 0; v < vectors; ++v) {
            frequency[v] = _mm512_or_si512(of_vector(low, v), _mm512_slli_epi32(of_vector(high, v), 8));
            offset[v] = low_bits(state[v]);
            any |= others[v] = _mm512_cmpge_epu32_mask(offset[v], frequency[v]);
        }
        if (any == 0) {
            for (unsigned v = 0; v < vectors; ++v) advance(state[v], frequency[v], offset[v], words);
            store_row<vectors>(out, first);
            continue;
        }
        const __m512i group = look_up(group_of, parent);
        __m512i slot[vectors];
        for (unsigned v = 0; v < vectors; ++v) {
            const __m512i index = _mm512_or_si512(offset[v], _mm512_slli_epi32(of_vector(group, v), frequency_bits));
            slot[v] = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), others[v], index, slots, sizeof(Slot));
            frequency[v] = _mm512_mask_mov_epi32(frequency[v], others[v], frequency_of(slot[v]));
            offset[v] = _mm512_mask_mov_epi32(offset[v], others[v], low_bits(slot[v]));
            advance(state[v], frequency[v], offset[v], words);
        }
        for (unsigned v = 0; v < vectors; ++v) {
            const __m512i symbol = _mm512_srli_epi32(slot[v], 24);
            const __m512i pair = _mm512_or_si512(_mm512_slli_epi32(of_vector(parent, v), 8), symbol);
            const __m512i level = _mm512_mask_i32gather_epi32(of_vector(first, v), others[v], pair, level_of, 1);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + v * lanes), _mm512_cvtepi32_epi8(level));  // its low byte
        }
    }
    for (unsigned v = 0; v < vectors; ++v) _mm512_storeu_si512(block.states.data() + v * lanes, state[v]);
    block.words = words;
    return begin;
}

// Encodes one level with each of sixteen states. Writes words backwards from `words`.
template <bool with_parent>
DYNAQUANT_AVX512 inline void encode_step(__m512i& state, std::uint16_t*& words, const EncoderTable& table,
                                         const std::uint8_t* parent, const std::uint8_t* levels) {
    __m256i index = _mm256_cvtepu8_epi16(load16(levels));
    if constexpr (with_parent) {
        const __m256i columns = _mm256_set1_epi16(static_cast<short>(table.columns));
        index = _mm256_add_epi16(index, _mm256_mullo_epi16(_mm256_cvtepu8_epi16(load16(parent)), columns));
    }
    const __m512i at = _mm512_cvtepu16_epi32(index);
    const auto* const steps = reinterpret_cast<const std::uint8_t*>(table.steps.data());
    const __m512i reciprocal = _mm512_i32gather_epi32(at, steps, sizeof(EncoderStep));
    const __m512i rest = _mm512_i32gather_epi32(at, steps + offsetof(EncoderStep, rest), sizeof(EncoderStep));
    const __m512i whole = _mm512_set1_epi32(frequency_total);
    const __m512i complement = _mm512_and_si512(rest, _mm512_set1_epi32(frequency_total - 1));

    // A state is full if its highest 12 bits are not below the frequency.
    const __m512i high_bits = _mm512_srli_epi32(state, 32 - frequency_bits);
    const __mmask16 full = _mm512_cmpge_epu32_mask(_mm512_add_epi32(high_bits, complement), whole);
    const auto count = static_cast<unsigned>(std::popcount(static_cast<unsigned>(full)));
    words -= count;
    _mm256_mask_storeu_epi16(words, static_cast<__mmask16>((1u << count) - 1),
                             _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, state)));
    state = _mm512_mask_srli_epi32(state, full, state, 16);

    const __m512i rounded = _mm512_add_epi32(state, _mm512_srli_epi32(rest, 29));
    const __m512i even = _mm512_mul_epu32(rounded, reciprocal);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(rounded, 32), _mm512_srli_epi64(reciprocal, 32));
    const __m512i high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
    const __m512i shift = _mm512_and_si512(_mm512_srli_epi32(rest, 25), _mm512_set1_epi32(0xF));
    const __m512i bias = _mm512_and_si512(_mm512_srli_epi32(rest, 12), _mm512_set1_epi32(0x1FFF));
    const __m512i quotient = _mm512_srlv_epi32(high, shift);
    state = _mm512_add_epi32(_mm512_add_epi32(state, bias), _mm512_mullo_epi32(quotient, complement));
}

template <unsigned vectors, bool with_parent>
DYNAQUANT_AVX512 void encode_rows(Encoding& block, std::span<const std::uint8_t> levels) {
    constexpr std::size_t row = vectors * lanes;
    __m512i state[vectors];
    for (unsigned v = 0; v < vectors; ++v) state[v] = _mm512_loadu_si512(block.states.data() + v * lanes);
    std::uint16_t* words = block.words;
    const std::uint8_t* parent = block.parent;
    for (std::size_t end = levels.size(); end > 0; end -= row)
        for (unsigned v = vectors; v-- > 0;) {
            const std::size_t i = end - row + v * lanes;
            encode_step<with_parent>(state[v], words, *block.table, parent + (with_parent ? i : 0), levels.data() + i);
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
    return states == 32 ? decode_given<2>(block, levels, begin) : decode_given<1>(block, levels, begin);
}

void encode_rows_avx512(Encoding& block, unsigned states, std::span<const std::uint8_t> levels) {
    (states == 32 ? encode_with<2> : encode_with<1>)[block.parent != nullptr](block, levels);
}

}  // namespace dynaquant::level_rans

#endif
