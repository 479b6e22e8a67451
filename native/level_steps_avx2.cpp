// The inner loops of level_rans with AVX2: eight states in a vector.
#include <array>
#include <bit>

#include "lane_orders.hpp"
#include "level_steps.hpp"
#include "tables.hpp"

#ifdef DYNAQUANT_X86

namespace dynaquant::level_rans {
namespace {

constexpr unsigned lanes = 8;

using Eight = std::array<std::uint32_t, lanes>;

DYNAQUANT_AVX2 inline __m256i load(const std::uint32_t* numbers) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
}

DYNAQUANT_AVX2 inline void store(std::uint32_t* numbers, __m256i vector) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers), vector);
}

// Bytes of a row of 16 or 32 states, in the low part of a register.
template <unsigned vectors>
DYNAQUANT_AVX2 inline __m256i load_row(const std::uint8_t* bytes) {
    if constexpr (vectors == 2) return _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

template <unsigned vectors>
DYNAQUANT_AVX2 inline void store_row(std::uint8_t* bytes, __m256i row) {
    if constexpr (vectors == 2)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm256_castsi256_si128(row));
    else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes), row);
}

DYNAQUANT_AVX2 inline unsigned mask_of(__m256i lanes_that_are) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes_that_are)));
}

// Shifts a word into each state that is too low. Reads 16 bytes of words.
DYNAQUANT_AVX2 inline void refill(__m256i& state, const std::uint8_t*& words) {
    const __m256i needy = _mm256_cmpeq_epi32(_mm256_srli_epi32(state, 16), _mm256_setzero_si256());
    const unsigned mask = mask_of(needy);
    const __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
    const __m256i places = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&word_of_lane[mask])));
    const __m256i refilled =
        _mm256_or_si256(_mm256_slli_epi32(state, 16), _mm256_permutevar8x32_epi32(next, places));
    state = _mm256_blendv_epi8(state, refilled, needy);
    words += 2 * std::popcount(mask);
}

// Decodes one level with each of eight states. Reads 16 bytes of words.
template <bool with_parent>
DYNAQUANT_AVX2 inline void decode_step(__m256i& state, const std::uint8_t*& words, const DecoderTable& table,
                                       const std::uint8_t* parent, std::uint8_t* levels) {
    const __m256i low = _mm256_set1_epi32(frequency_total - 1);
    alignas(32) Eight at, slots;
    _mm256_store_si256(reinterpret_cast<__m256i*>(at.data()), _mm256_and_si256(state, low));
    // Scalar look-ups: gather instructions do the same, but are slower on many processors with AVX2.
    for (unsigned lane = 0; lane < lanes; ++lane) {
        const Slot slot = (with_parent ? table.slots_of(parent[lane]) : table.slots.data())[at[lane]];
        const std::size_t symbol = slot >> 24;
        slots[lane] = slot;
        levels[lane] = with_parent ? table.level_of[std::size_t{parent[lane]} << 8 | symbol]
                                   : static_cast<std::uint8_t>(symbol);
    }
    const __m256i slot = _mm256_load_si256(reinterpret_cast<const __m256i*>(slots.data()));
    const __m256i quotient = _mm256_srli_epi32(state, frequency_bits);
    const __m256i less = _mm256_and_si256(_mm256_srli_epi32(slot, frequency_bits), low);  // frequency - 1
    const __m256i product = _mm256_add_epi32(_mm256_mullo_epi32(less, quotient), quotient);
    state = _mm256_add_epi32(product, _mm256_and_si256(slot, low));
    refill(state, words);
}

template <unsigned vectors, bool with_parent>
DYNAQUANT_AVX2 std::size_t decode_rows(Decoding& block, std::span<std::uint8_t> levels, std::size_t begin) {
    constexpr std::size_t row = vectors * lanes;
    __m256i state[vectors];
    for (unsigned v = 0; v < vectors; ++v) state[v] = load(block.states.data() + v * lanes);
    const std::uint8_t* words = block.words;
    const std::uint8_t* parent = block.parent;
    for (; levels.size() - begin >= row && block.readable - words >= std::ptrdiff_t{2 * row}; begin += row)
        for (unsigned v = 0; v < vectors; ++v) {
            const std::size_t i = begin + v * lanes;
            decode_step<with_parent>(state[v], words, *block.table, parent + (with_parent ? i : 0), levels.data() + i);
        }
    for (unsigned v = 0; v < vectors; ++v) store(block.states.data() + v * lanes, state[v]);
    block.words = words;
    return begin;
}

// What a DecoderTable says of the near symbols after each of few parent levels, in registers.
class NearSymbolsOfFew {
public:
    static constexpr std::uint8_t highest = 15;

    DYNAQUANT_AVX2 explicit NearSymbolsOfFew(const DecoderTable& table) {
        for (std::size_t s = 0; s < near_symbols; ++s) {
            std::array<std::uint8_t, highest + 1> low, high;
            for (std::size_t i = 0; i <= highest; ++i) {
                low[i] = static_cast<std::uint8_t>(table.ends[s][i]);
                high[i] = static_cast<std::uint8_t>(table.ends[s][i] >> 8);
            }
            low_[s] = twice(low.data());
            high_[s] = twice(high.data());
            levels_[s] = twice(table.near[s].data());
        }
    }
    // Sets ends[v] to where the slots of a symbol end, for the parent levels of each vector of states.
    DYNAQUANT_AVX2 void ends(std::size_t symbol, __m256i parent, __m256i* ends, unsigned vectors) const {
        const __m256i low = _mm256_shuffle_epi8(low_[symbol], parent);
        const __m256i high = _mm256_shuffle_epi8(high_[symbol], parent);
        const __m256i even = _mm256_unpacklo_epi8(low, high), odd = _mm256_unpackhi_epi8(low, high);
        ends[0] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(even));
        ends[1] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(odd));
        if (vectors == 2) return;
        ends[2] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(even, 1));
        ends[3] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(odd, 1));
    }
    DYNAQUANT_AVX2 __m256i levels(std::size_t symbol, __m256i parent) const {
        return _mm256_shuffle_epi8(levels_[symbol], parent);
    }

private:
    DYNAQUANT_AVX2 static __m256i twice(const std::uint8_t* bytes) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    }

    __m256i low_[near_symbols], high_[near_symbols], levels_[near_symbols];
};

// Returns the low bytes of two or four vectors of masks, in their order.
template <unsigned vectors>
DYNAQUANT_AVX2 inline __m256i bytes_of(const __m256i* masks) {
    const __m256i first = _mm256_packs_epi32(masks[0], masks[1]);
    const __m256i second = vectors == 2 ? first : _mm256_packs_epi32(masks[vectors - 2], masks[vectors - 1]);
    // Packing interleaves the halves of the registers.
    const __m256i order = vectors == 2 ? _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5)
                                       : _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
}

// Decodes rows with a parent of few levels. A state shows the near symbols without a look-up in memory. A row with
// others, which are rare, is looked up there.
template <unsigned vectors>
DYNAQUANT_AVX2 std::size_t decode_few(Decoding& block, std::span<std::uint8_t> levels, std::size_t begin) {
    constexpr std::size_t row = vectors * lanes;
    const DecoderTable& table = *block.table;
    const NearSymbolsOfFew near(table);
    const __m256i low = _mm256_set1_epi32(frequency_total - 1), one = _mm256_set1_epi32(1);
    __m256i state[vectors];
    for (unsigned v = 0; v < vectors; ++v) state[v] = load(block.states.data() + v * lanes);
    const std::uint8_t* words = block.words;
    for (; levels.size() - begin >= row && block.readable - words >= std::ptrdiff_t{2 * row}; begin += row) {
        const std::uint8_t* const source = block.parent + begin;
        std::uint8_t* const out = levels.data() + begin;
        const __m256i parent = load_row<vectors>(source);
        __m256i ends[near_symbols][vectors], is_1_or_more[vectors], is_2_or_more[vectors];
        __m256i frequency[vectors], offset[vectors], others = _mm256_setzero_si256();
        for (std::size_t s = 0; s < near_symbols; ++s) near.ends(s, parent, ends[s], vectors);
        for (unsigned v = 0; v < vectors; ++v) {
            const __m256i place = _mm256_and_si256(state[v], low), after = _mm256_add_epi32(place, one);
            const __m256i past_0 = _mm256_cmpgt_epi32(after, ends[0][v]), past_1 = _mm256_cmpgt_epi32(after, ends[1][v]);
            others = _mm256_or_si256(others, _mm256_cmpgt_epi32(after, ends[2][v]));
            // The slots of the symbol begin at the last end that is not after the state's place, and end at the next.
            const __m256i start = _mm256_max_epi32(_mm256_and_si256(past_0, ends[0][v]),
                                                   _mm256_and_si256(past_1, ends[1][v]));
            const __m256i next = _mm256_min_epu32(_mm256_or_si256(past_0, ends[0][v]),
                                                  _mm256_or_si256(past_1, ends[1][v]));
            frequency[v] = _mm256_sub_epi32(_mm256_min_epu32(next, ends[2][v]), start);
            offset[v] = _mm256_sub_epi32(place, start);
            is_1_or_more[v] = past_0;
            is_2_or_more[v] = past_1;
        }
        if (!_mm256_testz_si256(others, others)) {
            for (unsigned v = 0; v < vectors; ++v)
                decode_step<true>(state[v], words, table, source + v * lanes, out + v * lanes);
            continue;
        }
        for (unsigned v = 0; v < vectors; ++v) {
            const __m256i product = _mm256_mullo_epi32(frequency[v], _mm256_srli_epi32(state[v], frequency_bits));
            state[v] = _mm256_add_epi32(product, offset[v]);
            refill(state[v], words);
        }
        __m256i level = _mm256_blendv_epi8(near.levels(0, parent), near.levels(1, parent), bytes_of<vectors>(is_1_or_more));
        level = _mm256_blendv_epi8(level, near.levels(2, parent), bytes_of<vectors>(is_2_or_more));
        store_row<vectors>(out, level);
    }
    for (unsigned v = 0; v < vectors; ++v) store(block.states.data() + v * lanes, state[v]);
    block.words = words;
    return begin;
}

// Encodes one level with each of eight states. Stores eight words before `words`, but moves it only by those that
// count.
template <bool with_parent>
DYNAQUANT_AVX2 inline void encode_step(__m256i& state, std::uint16_t*& words, const EncoderTable& table,
                                       const std::uint8_t* parent, const std::uint8_t* levels) {
    const auto step = [&](unsigned lane) {
        const std::size_t row = with_parent ? parent[lane] * table.columns : 0;
        return std::bit_cast<long long>(table.steps[row + levels[lane]]);
    };
    const __m256 a = _mm256_castsi256_ps(_mm256_setr_epi64x(step(0), step(1), step(4), step(5)));
    const __m256 b = _mm256_castsi256_ps(_mm256_setr_epi64x(step(2), step(3), step(6), step(7)));
    const __m256i reciprocal = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
    const __m256i rest = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xDD));
    const __m256i complement = _mm256_and_si256(rest, _mm256_set1_epi32(frequency_total - 1));

    // A state is full if its highest 12 bits are not below the frequency.
    const __m256i high_bits = _mm256_srli_epi32(state, 32 - frequency_bits);
    const __m256i full = _mm256_cmpgt_epi32(_mm256_add_epi32(high_bits, complement),
                                            _mm256_set1_epi32(frequency_total - 1));
    const unsigned mask = mask_of(full);
    const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&lane_of_word[mask])));
    const __m256i low = _mm256_and_si256(_mm256_permutevar8x32_epi32(state, order), _mm256_set1_epi32(0xFFFF));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words - lanes),
                     _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
    words -= std::popcount(mask);
    state = _mm256_blendv_epi8(state, _mm256_srli_epi32(state, 16), full);

    const __m256i rounded = _mm256_add_epi32(state, _mm256_srli_epi32(rest, 29));
    const __m256i even = _mm256_mul_epu32(rounded, reciprocal);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(rounded, 32), _mm256_srli_epi64(reciprocal, 32));
    const __m256i high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    const __m256i shift = _mm256_and_si256(_mm256_srli_epi32(rest, 25), _mm256_set1_epi32(0xF));
    const __m256i bias = _mm256_and_si256(_mm256_srli_epi32(rest, 12), _mm256_set1_epi32(0x1FFF));
    const __m256i quotient = _mm256_srlv_epi32(high, shift);
    state = _mm256_add_epi32(_mm256_add_epi32(state, bias), _mm256_mullo_epi32(quotient, complement));
}

template <unsigned vectors, bool with_parent>
DYNAQUANT_AVX2 void encode_rows(Encoding& block, std::span<const std::uint8_t> levels) {
    constexpr std::size_t row = vectors * lanes;
    __m256i state[vectors];
    for (unsigned v = 0; v < vectors; ++v) state[v] = load(block.states.data() + v * lanes);
    std::uint16_t* words = block.words;
    const std::uint8_t* parent = block.parent;
    for (std::size_t end = levels.size(); end > 0; end -= row)
        for (unsigned v = vectors; v-- > 0;) {
            const std::size_t i = end - row + v * lanes;
            encode_step<with_parent>(state[v], words, *block.table, parent + (with_parent ? i : 0), levels.data() + i);
        }
    for (unsigned v = 0; v < vectors; ++v) store(block.states.data() + v * lanes, state[v]);
    block.words = words;
}

template <unsigned vectors>
constexpr auto decode_with = std::array{decode_rows<vectors, false>, decode_rows<vectors, true>};
template <unsigned vectors>
constexpr auto encode_with = std::array{encode_rows<vectors, false>, encode_rows<vectors, true>};

}  // namespace

std::size_t decode_rows_avx2(Decoding& block, unsigned states, std::span<std::uint8_t> levels, std::size_t begin) {
    if (states >= 2 * lanes && block.parent != nullptr &&
        highest_of({block.parent + begin, levels.size() - begin}) <= NearSymbolsOfFew::highest)
        return states == 32 ? decode_few<4>(block, levels, begin) : decode_few<2>(block, levels, begin);
    const auto& decode = states == 32 ? decode_with<4> : states == 16 ? decode_with<2> : decode_with<1>;
    return decode[block.parent != nullptr](block, levels, begin);
}

void encode_rows_avx2(Encoding& block, unsigned states, std::span<const std::uint8_t> levels) {
    const auto& encode = states == 32 ? encode_with<4> : states == 16 ? encode_with<2> : encode_with<1>;
    encode[block.parent != nullptr](block, levels);
}

}  // namespace dynaquant::level_rans

#endif
