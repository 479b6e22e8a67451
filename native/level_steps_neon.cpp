// The inner loops of level_rans with NEON: eight states in two vectors.
#include <array>
#include <bit>

#include "lane_orders.hpp"
#include "level_steps.hpp"
#include "tables.hpp"

#ifdef DYNAQUANT_NEON

namespace dynaquant::level_rans {
namespace {

constexpr unsigned lanes = 8;

// The low and the high 16 bits of eight states. Words come from low halves, and go there.
struct Eight {
    uint16x8_t low, high;

    uint32x4_t first() const { return vreinterpretq_u32_u16(vzip1q_u16(low, high)); }
    uint32x4_t second() const { return vreinterpretq_u32_u16(vzip2q_u16(low, high)); }
};

inline Eight eight_of(uint32x4_t first, uint32x4_t second) {
    const uint16x8_t a = vreinterpretq_u16_u32(first), b = vreinterpretq_u16_u32(second);
    return {vuzp1q_u16(a, b), vuzp2q_u16(a, b)};
}

inline Eight load(const std::uint32_t* states) { return eight_of(vld1q_u32(states), vld1q_u32(states + 4)); }

inline void store(std::uint32_t* states, const Eight& eight) {
    vst1q_u32(states, eight.first());
    vst1q_u32(states + 4, eight.second());
}

inline uint16x8_t low_bits(uint16x8_t numbers) { return vandq_u16(numbers, vdupq_n_u16(frequency_total - 1)); }

// A set of lanes, as the index of its orders, and how many there are.
struct Lanes {
    unsigned mask, count;
};

inline Lanes lanes_of(uint16x8_t lanes_that_are) {
    // One sum finds both: each lane has a bit of the mask, and 256 for the count.
    static constexpr std::array<std::uint16_t, lanes> weights = {0x101, 0x102, 0x104, 0x108,
                                                                 0x110, 0x120, 0x140, 0x180};
    const unsigned sum = vaddvq_u16(vandq_u16(lanes_that_are, vld1q_u16(weights.data())));
    return {sum & 0xFF, sum >> 8};
}

// Returns the same orders for the two bytes of each word. Of 255 both are at least 254.
constexpr auto bytes_of(const LaneOrders& orders) {
    std::array<std::array<std::uint8_t, 2 * lanes>, 256> table{};
    for (unsigned mask = 0; mask < 256; ++mask)
        for (unsigned lane = 0; lane < lanes; ++lane) {
            table[mask][2 * lane] = static_cast<std::uint8_t>(2 * orders[mask][lane]);
            table[mask][2 * lane + 1] = static_cast<std::uint8_t>(2 * orders[mask][lane] + 1);
        }
    return table;
}

constexpr auto word_bytes_of_lane = bytes_of(word_of_lane), lane_bytes_of_word = bytes_of(lane_of_word);

// Shifts a word into each state that is too low. Reads 16 bytes of words.
inline void refill(Eight& state, const std::uint8_t*& words) {
    const uint16x8_t needy = vceqzq_u16(state.high);
    const Lanes set = lanes_of(needy);
    state.high = vbslq_u16(needy, state.low, state.high);
    // An index beyond the words leaves the byte as it is.
    state.low = vreinterpretq_u16_u8(vqtbx1q_u8(vreinterpretq_u8_u16(state.low), vld1q_u8(words),
                                                vld1q_u8(word_bytes_of_lane[set.mask].data())));
    words += 2 * set.count;
}

// Moves eight states on by symbols with these frequencies, whose slots begin so far before those of the states.
inline void advance(Eight& state, uint16x8_t frequency, uint16x8_t offset, const std::uint8_t*& words) {
    const uint32x4_t first = vmulq_u32(vshrq_n_u32(state.first(), frequency_bits), vmovl_u16(vget_low_u16(frequency)));
    const uint32x4_t second = vmulq_u32(vshrq_n_u32(state.second(), frequency_bits), vmovl_high_u16(frequency));
    state = eight_of(vaddw_u16(first, vget_low_u16(offset)), vaddw_high_u16(second, offset));
    refill(state, words);
}

// Decodes one level with each of eight states. Reads 16 bytes of words.
template <bool with_parent>
inline void decode_step(Eight& state, const std::uint8_t*& words, const DecoderTable& table,
                        const std::uint8_t* parent, std::uint8_t* levels) {
    // Local copies: the compiler knows that writing levels cannot change them.
    const Slot* const slots = table.slots.data();
    const std::uint8_t* const level_of = table.level_of;
    std::array<std::uint16_t, lanes> at;
    std::array<Slot, lanes> found;
    vst1q_u16(at.data(), low_bits(state.low));
    for (unsigned lane = 0; lane < lanes; ++lane) {
        const std::size_t group = with_parent ? table.group[parent[lane]] : 0;
        found[lane] = slots[group * frequency_total + at[lane]];
        if (with_parent) levels[lane] = level_of[std::size_t{parent[lane]} << 8 | found[lane] >> 24];
    }
    const Eight slot = load(found.data());
    if (!with_parent) vst1_u8(levels, vshrn_n_u16(slot.high, 8));
    // Of the 12 bits of the frequency - 1, the slot has four in the low half and eight in the high one.
    const uint16x8_t less = low_bits(vsriq_n_u16(vshlq_n_u16(slot.high, 4), slot.low, 12));
    advance(state, vaddq_u16(less, vdupq_n_u16(1)), low_bits(slot.low), words);
}

template <unsigned vectors, bool with_parent>
std::size_t decode_rows(Decoding& block, std::span<std::uint8_t> levels, std::size_t begin) {
    constexpr std::size_t row = vectors * lanes;
    Eight state[vectors];
    for (unsigned v = 0; v < vectors; ++v) state[v] = load(block.states.data() + v * lanes);
    const std::uint8_t* words = block.words;
    for (; levels.size() - begin >= row && block.readable - words >= std::ptrdiff_t{2 * row}; begin += row)
        for (unsigned v = 0; v < vectors; ++v) {
            const std::size_t i = begin + v * lanes;
            decode_step<with_parent>(state[v], words, *block.table, block.parent + (with_parent ? i : 0),
                                     levels.data() + i);
        }
    for (unsigned v = 0; v < vectors; ++v) store(block.states.data() + v * lanes, state[v]);
    block.words = words;
    return begin;
}

// The bytes of eight or sixteen states, in the low part of a register.
template <unsigned vectors>
inline uint8x16_t load_row(const std::uint8_t* bytes) {
    if constexpr (vectors == 1) return vcombine_u8(vld1_u8(bytes), vdup_n_u8(0));
    return vld1q_u8(bytes);
}

template <unsigned vectors>
inline void store_row(std::uint8_t* bytes, uint8x16_t row) {
    if constexpr (vectors == 1)
        vst1_u8(bytes, vget_low_u8(row));
    else
        vst1q_u8(bytes, row);
}

// Returns the low bytes of one or two vectors of masks.
template <unsigned vectors>
inline uint8x16_t low_bytes(const uint16x8_t* masks) {
    return vuzp1q_u8(vreinterpretq_u8_u16(masks[0]), vreinterpretq_u8_u16(masks[vectors - 1]));
}

// Bytes in registers, one for each of 16 or 64 parent levels.
inline void load(uint8x16_t& table, const std::uint8_t* bytes) { table = vld1q_u8(bytes); }
inline void load(uint8x16x4_t& table, const std::uint8_t* bytes) { table = vld1q_u8_x4(bytes); }
inline uint8x16_t look_up(uint8x16_t table, uint8x16_t index) { return vqtbl1q_u8(table, index); }
inline uint8x16_t look_up(const uint8x16x4_t& table, uint8x16_t index) { return vqtbl4q_u8(table, index); }

// What a DecoderTable says of the near symbols after each of few parent levels.
template <class Table>
class NearSymbolsOfFew {
public:
    static constexpr std::uint8_t highest = sizeof(Table) - 1;

    explicit NearSymbolsOfFew(const DecoderTable& table) {
        for (std::size_t s = 0; s < near_symbols; ++s) {
            std::array<std::uint8_t, highest + 1> low, high;
            for (std::size_t i = 0; i <= highest; ++i) {
                low[i] = static_cast<std::uint8_t>(table.ends[s][i]);
                high[i] = static_cast<std::uint8_t>(table.ends[s][i] >> 8);
            }
            load(low_[s], low.data());
            load(high_[s], high.data());
            load(levels_[s], table.near[s].data());
        }
    }
    // Sets ends[0] and ends[1] to where the slots of a symbol end, for 16 parent levels.
    void ends(std::size_t symbol, uint8x16_t parent, uint16x8_t* ends) const {
        const uint8x16_t low = look_up(low_[symbol], parent), high = look_up(high_[symbol], parent);
        ends[0] = vreinterpretq_u16_u8(vzip1q_u8(low, high));
        ends[1] = vreinterpretq_u16_u8(vzip2q_u8(low, high));
    }
    uint8x16_t levels(std::size_t symbol, uint8x16_t parent) const { return look_up(levels_[symbol], parent); }

private:
    Table low_[near_symbols], high_[near_symbols], levels_[near_symbols];
};

// Decodes one level with each of eight or sixteen states, with a parent of few levels. A state shows the near symbols
// without a look-up in memory. If one of them shows another, which is rare, all are looked up there.
template <unsigned vectors, class Near>
inline void decode_few_step(Eight* state, const std::uint8_t*& words, const DecoderTable& table, const Near& near,
                            const std::uint8_t* source, std::uint8_t* out) {
    const uint8x16_t parent = load_row<vectors>(source);
    uint16x8_t ends[near_symbols][2], past_0[vectors], past_1[vectors], frequency[vectors], offset[vectors];
    uint16x8_t others = vdupq_n_u16(0);
    for (std::size_t s = 0; s < near_symbols; ++s) near.ends(s, parent, ends[s]);
    for (unsigned v = 0; v < vectors; ++v) {
        const uint16x8_t place = low_bits(state[v].low);
        past_0[v] = vcgeq_u16(place, ends[0][v]);
        past_1[v] = vcgeq_u16(place, ends[1][v]);
        others = vorrq_u16(others, vcgeq_u16(place, ends[2][v]));
        const uint16x8_t start = vbslq_u16(past_1[v], ends[1][v], vandq_u16(past_0[v], ends[0][v]));
        const uint16x8_t next = vbslq_u16(past_1[v], ends[2][v], vbslq_u16(past_0[v], ends[1][v], ends[0][v]));
        frequency[v] = vsubq_u16(next, start);
        offset[v] = vsubq_u16(place, start);
    }
    if (vmaxvq_u16(others) != 0) {
        for (unsigned v = 0; v < vectors; ++v)
            decode_step<true>(state[v], words, table, source + v * lanes, out + v * lanes);
        return;
    }
    for (unsigned v = 0; v < vectors; ++v) advance(state[v], frequency[v], offset[v], words);
    const uint8x16_t level = vbslq_u8(low_bytes<vectors>(past_0), near.levels(1, parent), near.levels(0, parent));
    store_row<vectors>(out, vbslq_u8(low_bytes<vectors>(past_1), near.levels(2, parent), level));
}

template <unsigned vectors, class Table>
std::size_t decode_few(Decoding& block, std::span<std::uint8_t> levels, std::size_t begin) {
    constexpr std::size_t row = vectors * lanes;
    constexpr unsigned at_once = vectors == 1 ? 1 : 2;
    const NearSymbolsOfFew<Table> near(*block.table);
    Eight state[vectors];
    for (unsigned v = 0; v < vectors; ++v) state[v] = load(block.states.data() + v * lanes);
    const std::uint8_t* words = block.words;
    for (; levels.size() - begin >= row && block.readable - words >= std::ptrdiff_t{2 * row}; begin += row)
        for (unsigned v = 0; v < vectors; v += at_once) {
            const std::size_t i = begin + v * lanes;
            decode_few_step<at_once>(state + v, words, *block.table, near, block.parent + i, levels.data() + i);
        }
    for (unsigned v = 0; v < vectors; ++v) store(block.states.data() + v * lanes, state[v]);
    block.words = words;
    return begin;
}

// Moves four states on by their steps. complement: 4096 - frequency.
inline uint32x4_t push(uint32x4_t state, uint32x4_t reciprocal, uint32x4_t rest, uint32x4_t complement) {
    const uint32x4_t rounded = vsraq_n_u32(state, rest, 29);
    const uint64x2_t low = vmull_u32(vget_low_u32(rounded), vget_low_u32(reciprocal));
    const uint64x2_t high = vmull_high_u32(rounded, reciprocal);
    const uint32x4_t quotient = vuzp2q_u32(vreinterpretq_u32_u64(low), vreinterpretq_u32_u64(high));
    const uint32x4_t shift = vandq_u32(vshrq_n_u32(rest, 25), vdupq_n_u32(0xF));
    const uint32x4_t biased = vsraq_n_u32(state, vshlq_n_u32(rest, 7), 19);  // the bias has 13 bits, from 12 on
    return vmlaq_u32(biased, vshlq_u32(quotient, vnegq_s32(vreinterpretq_s32_u32(shift))), complement);
}

// Encodes one level with each of eight states. Stores eight words before `words`, but moves it only by those that
// count.
template <bool with_parent>
inline void encode_step(Eight& state, std::uint16_t*& words, const EncoderTable& table, const std::uint8_t* parent,
                        const std::uint8_t* levels) {
    uint16x8_t pair = vmovl_u8(vld1_u8(levels));
    if constexpr (with_parent)
        pair = vmlaq_n_u16(pair, vmovl_u8(vld1_u8(parent)), static_cast<std::uint16_t>(table.columns));
    std::array<std::uint16_t, lanes> at;
    vst1q_u16(at.data(), pair);
    const auto step = [&](unsigned lane) { return vcreate_u64(std::bit_cast<std::uint64_t>(table.steps[at[lane]])); };
    const auto two = [&](unsigned lane) { return vreinterpretq_u32_u64(vcombine_u64(step(lane), step(lane + 1))); };
    const uint32x4_t a = two(0), b = two(2), c = two(4), d = two(6);
    const uint32x4_t rest[] = {vuzp2q_u32(a, b), vuzp2q_u32(c, d)};
    const uint16x8_t complement = low_bits(eight_of(rest[0], rest[1]).low);

    // A state is full if its highest 12 bits are not below the frequency.
    const uint16x8_t full = vcgeq_u16(vsraq_n_u16(complement, state.high, 4), vdupq_n_u16(frequency_total));
    const Lanes set = lanes_of(full);
    vst1q_u16(words - lanes, vreinterpretq_u16_u8(vqtbl1q_u8(vreinterpretq_u8_u16(state.low),
                                                            vld1q_u8(lane_bytes_of_word[set.mask].data()))));
    words -= set.count;
    state = {vbslq_u16(full, state.high, state.low), vbicq_u16(state.high, full)};

    state = eight_of(push(state.first(), vuzp1q_u32(a, b), rest[0], vmovl_u16(vget_low_u16(complement))),
                     push(state.second(), vuzp1q_u32(c, d), rest[1], vmovl_high_u16(complement)));
}

template <unsigned vectors, bool with_parent>
void encode_rows(Encoding& block, std::span<const std::uint8_t> levels) {
    constexpr std::size_t row = vectors * lanes;
    Eight state[vectors];
    for (unsigned v = 0; v < vectors; ++v) state[v] = load(block.states.data() + v * lanes);
    std::uint16_t* words = block.words;
    for (std::size_t end = levels.size(); end > 0; end -= row)
        for (unsigned v = vectors; v-- > 0;) {
            const std::size_t i = end - row + v * lanes;
            encode_step<with_parent>(state[v], words, *block.table, block.parent + (with_parent ? i : 0),
                                     levels.data() + i);
        }
    for (unsigned v = 0; v < vectors; ++v) store(block.states.data() + v * lanes, state[v]);
    block.words = words;
}

// Decodes rows of 8, 16 or 32 states.
template <unsigned vectors>
std::size_t decode(Decoding& block, std::span<std::uint8_t> levels, std::size_t begin) {
    if (block.parent == nullptr) return decode_rows<vectors, false>(block, levels, begin);
    const std::uint8_t highest = highest_of({block.parent + begin, levels.size() - begin});
    if (highest <= NearSymbolsOfFew<uint8x16_t>::highest)
        return decode_few<vectors, uint8x16_t>(block, levels, begin);
    if (highest <= NearSymbolsOfFew<uint8x16x4_t>::highest)
        return decode_few<vectors, uint8x16x4_t>(block, levels, begin);
    return decode_rows<vectors, true>(block, levels, begin);
}

template <unsigned vectors>
constexpr auto encode_with = std::array{encode_rows<vectors, false>, encode_rows<vectors, true>};

}  // namespace

std::size_t decode_rows_neon(Decoding& block, unsigned states, std::span<std::uint8_t> levels, std::size_t begin) {
    return (states == 32 ? decode<4> : states == 16 ? decode<2> : decode<1>)(block, levels, begin);
}

void encode_rows_neon(Encoding& block, unsigned states, std::span<const std::uint8_t> levels) {
    const auto& encode = states == 32 ? encode_with<4> : states == 16 ? encode_with<2> : encode_with<1>;
    encode[block.parent != nullptr](block, levels);
}

}  // namespace dynaquant::level_rans

#endif
