// The inner loops of plane_rans, in plain C++ and with AVX2.
#include "plane_rans_steps.hpp"

#include <bit>
#include <cstring>
#include <stdexcept>

#include "cpu.hpp"
#include "lane_orders.hpp"

namespace dynaquant::plane_rans {
namespace {

std::size_t class_at(const Classes& classes, const std::uint8_t* symbols, std::size_t i) {
    if (classes.kind == Classes::given) return classes.of_symbol[i];
    return classes.kind == Classes::one || i < rans_states ? 0 : class_of(classes.top, symbols[i - rans_states]);
}

// Decodes symbols [begin, end), one after the other.
void decode_plain(States& states, Words& words, const Slot* slots, const Classes& classes, std::uint8_t* symbols,
                  std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
        std::uint32_t& state = states[i % rans_states];
        const std::size_t row = class_at(classes, symbols, i) << probability_bits;
        const Slot slot = slots[row | (state & (probability_whole - 1))];
        symbols[i] = static_cast<std::uint8_t>(slot);
        state = ((slot >> 20) + 1) * (state >> probability_bits) + (slot >> 8 & (probability_whole - 1));
        if (state >= lowest_state) continue;
        if (words.end - words.next < 2) throw std::invalid_argument("the exact values end too early");
        state = state << 16 | words.next[0] | std::uint32_t{words.next[1]} << 8;
        words.next += 2;
    }
}

// Encodes symbols [begin, end), the last one first.
std::uint16_t* encode_plain(States& states, const EncoderStep* steps, const std::uint8_t* classes,
                            const std::uint8_t* symbols, std::size_t begin, std::size_t end, std::uint16_t* next) {
    for (std::size_t i = end; i-- > begin;) {
        const std::size_t row = classes == nullptr ? 0 : classes[i] * byte_values;
        const EncoderStep step = steps[row + symbols[i]];
        const std::uint32_t complement = step.rest & (probability_whole - 1);
        std::uint32_t& state = states[i % rans_states];
        if (state >= (probability_whole - complement) << (31 - probability_bits)) {
            *--next = static_cast<std::uint16_t>(state);
            state >>= 16;
        }
        const auto high = static_cast<std::uint32_t>(std::uint64_t{state} * step.reciprocal >> 32);
        state += (step.rest >> 11 & 0xFFF) + (high >> (step.rest >> 23)) * complement;
    }
    return next;
}

#ifdef DYNAQUANT_X86

// Returns slots[index[lane]] in every lane. Gather instructions do the same, but are slower on many processors.
DYNAQUANT_AVX2 inline __m256i look_up(const Slot* slots, __m256i index) {
    alignas(32) std::array<std::uint32_t, 8> at;
    _mm256_store_si256(reinterpret_cast<__m256i*>(at.data()), index);
    const auto slot = [&](unsigned lane) { return static_cast<int>(slots[at[lane]]); };
    return _mm256_setr_epi32(slot(0), slot(1), slot(2), slot(3), slot(4), slot(5), slot(6), slot(7));
}

// Decodes one symbol in each of eight states. Returns the slots, whose low bytes are the symbols. Reads 16 bytes of
// words.
DYNAQUANT_AVX2 inline __m256i step(__m256i& state, const std::uint8_t*& next, const Slot* slots, __m256i rows) {
    const __m256i low = _mm256_set1_epi32(probability_whole - 1);
    const __m256i index = _mm256_or_si256(_mm256_and_si256(state, low), rows);
    const __m256i slot = look_up(slots, index);
    const __m256i quotient = _mm256_srli_epi32(state, probability_bits);
    const __m256i place = _mm256_and_si256(_mm256_srli_epi32(slot, 8), low);
    const __m256i product = _mm256_mullo_epi32(_mm256_srli_epi32(slot, 20), quotient);
    state = _mm256_add_epi32(_mm256_add_epi32(product, quotient), place);

    const __m256i needy = _mm256_cmpgt_epi32(_mm256_set1_epi32(lowest_state), state);
    const auto mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(needy)));
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(next)));
    const __m256i places = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&word_of_lane[mask])));
    const __m256i taken = _mm256_permutevar8x32_epi32(words, places);
    const __m256i refilled = _mm256_or_si256(_mm256_slli_epi32(state, 16), taken);
    state = _mm256_blendv_epi8(state, refilled, needy);
    next += 2 * std::popcount(mask);
    return slot;
}

// Returns where the slots of the classes of eight symbols begin.
template <Classes::Kind kind>
DYNAQUANT_AVX2 inline __m256i rows_of(const Classes& classes, std::size_t i, __m256i previous) {
    if constexpr (kind == Classes::one) return _mm256_setzero_si256();
    __m256i row;
    if constexpr (kind == Classes::given) {
        row = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(classes.of_symbol + i)));
    } else {
        const __m256i below = _mm256_sub_epi32(_mm256_set1_epi32(classes.top), previous);
        row = _mm256_min_epi32(_mm256_max_epi32(below, _mm256_setzero_si256()), _mm256_set1_epi32(class_count - 1));
    }
    return _mm256_slli_epi32(row, probability_bits);
}

// Decodes 32 symbols at a time, while 32 symbols and all words that they may need are left. Returns how many it
// decoded.
template <Classes::Kind kind>
DYNAQUANT_AVX2 std::size_t decode_avx2(States& states, Words& words, const Slot* slots, const Classes& classes,
                                       std::span<std::uint8_t> symbols) {
    __m256i state[4], symbol[4];
    for (unsigned v = 0; v < 4; ++v) {
        state[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states.data() + 8 * v));
        symbol[v] = _mm256_set1_epi32(classes.top);  // so that the first 32 symbols are of class 0
    }
    const __m256i bytes = _mm256_set1_epi32(0xFF);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const std::uint8_t* next = words.next;
    std::size_t i = 0;
    for (; symbols.size() - i >= 32 && words.end - next >= 80; i += 32) {
        for (unsigned v = 0; v < 4; ++v) {
            const __m256i rows = rows_of<kind>(classes, i + 8 * v, symbol[v]);
            symbol[v] = _mm256_and_si256(step(state[v], next, slots, rows), bytes);
        }
        // Packing interleaves the halves of the registers. `order` moves groups of four back.
        const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(symbol[0], symbol[1]),
                                                   _mm256_packus_epi32(symbol[2], symbol[3]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(symbols.data() + i),
                            _mm256_permutevar8x32_epi32(packed, order));
    }
    for (unsigned v = 0; v < 4; ++v)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(states.data() + 8 * v), state[v]);
    words.next = next;
    return i;
}

struct Steps {
    __m256i reciprocal, rest;
};

// Returns the steps of eight symbols.
template <bool with_classes>
DYNAQUANT_AVX2 inline Steps look_up(const EncoderStep* steps, const std::uint8_t* classes,
                                    const std::uint8_t* symbols) {
    const auto step = [&](unsigned lane) {
        const std::size_t row = with_classes ? classes[lane] * byte_values : 0;
        return std::bit_cast<long long>(steps[row + symbols[lane]]);
    };
    const __m256i a = _mm256_setr_epi64x(step(0), step(1), step(4), step(5));
    const __m256i b = _mm256_setr_epi64x(step(2), step(3), step(6), step(7));
    const __m256 low = _mm256_castsi256_ps(a), high = _mm256_castsi256_ps(b);
    return {_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88)),
            _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xDD))};
}

// Encodes one symbol in each of eight states. Stores eight words before `next`, but moves it only by those that count.
DYNAQUANT_AVX2 inline void encode_step(__m256i& state, const Steps& steps, std::uint16_t*& next) {
    const __m256i whole = _mm256_set1_epi32(probability_whole);
    const __m256i complement = _mm256_and_si256(steps.rest, _mm256_set1_epi32(probability_whole - 1));
    const __m256i bias = _mm256_and_si256(_mm256_srli_epi32(steps.rest, 11), _mm256_set1_epi32(0xFFF));
    const __m256i limit = _mm256_slli_epi32(_mm256_sub_epi32(whole, complement), 31 - probability_bits);
    // Compare with one less, because 2^31 would be negative.
    const __m256i full = _mm256_cmpgt_epi32(state, _mm256_sub_epi32(limit, _mm256_set1_epi32(1)));

    const auto mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(full)));
    const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&lane_of_word[mask])));
    const __m256i words = _mm256_and_si256(_mm256_permutevar8x32_epi32(state, lanes), _mm256_set1_epi32(0xFFFF));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(next - 8),
                     _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    next -= std::popcount(mask);
    state = _mm256_blendv_epi8(state, _mm256_srli_epi32(state, 16), full);

    const __m256i even = _mm256_mul_epu32(state, steps.reciprocal);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(state, 32), _mm256_srli_epi64(steps.reciprocal, 32));
    const __m256i high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    const __m256i quotient = _mm256_srlv_epi32(high, _mm256_srli_epi32(steps.rest, 23));
    state = _mm256_add_epi32(_mm256_add_epi32(state, bias), _mm256_mullo_epi32(quotient, complement));
}

// Encodes the first `count` symbols, a multiple of 32.
template <bool with_classes>
DYNAQUANT_AVX2 std::uint16_t* encode_avx2(States& states, const EncoderStep* steps, const std::uint8_t* classes,
                                          const std::uint8_t* symbols, std::size_t count, std::uint16_t* next) {
    __m256i state[4];
    for (unsigned v = 0; v < 4; ++v)
        state[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states.data() + 8 * v));
    for (std::size_t i = count; i > 0; i -= 32) {
        for (unsigned v = 4; v-- > 0;) {
            const std::size_t at = i - 32 + 8 * v;
            encode_step(state[v], look_up<with_classes>(steps, classes + (with_classes ? at : 0), symbols + at), next);
        }
    }
    for (unsigned v = 0; v < 4; ++v)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(states.data() + 8 * v), state[v]);
    return next;
}

#endif

}  // namespace

std::uint16_t* encode_symbols(States& states, const EncoderStep* steps, const std::uint8_t* classes,
                              std::span<const std::uint8_t> symbols, std::uint16_t* end) {
    std::size_t left = symbols.size();
#ifdef DYNAQUANT_X86
    if (has_avx2()) {
        const std::size_t whole = symbols.size() / rans_states * rans_states;
        end = encode_plain(states, steps, classes, symbols.data(), whole, left, end);
        left = 0;
        end = classes == nullptr ? encode_avx2<false>(states, steps, classes, symbols.data(), whole, end)
                                 : encode_avx2<true>(states, steps, classes, symbols.data(), whole, end);
    }
#endif
    return encode_plain(states, steps, classes, symbols.data(), 0, left, end);
}

void decode_symbols(States& states, Words& words, const Slot* slots, const Classes& classes,
                    std::span<std::uint8_t> symbols) {
    std::size_t done = 0;
#ifdef DYNAQUANT_X86
    if (has_avx2()) {
        const auto decode = classes.kind == Classes::one     ? decode_avx2<Classes::one>
                            : classes.kind == Classes::given ? decode_avx2<Classes::given>
                                                             : decode_avx2<Classes::by_previous>;
        done = decode(states, words, slots, classes, symbols);
    }
#endif
    decode_plain(states, words, slots, classes, symbols.data(), done, symbols.size());
}

}  // namespace dynaquant::plane_rans
