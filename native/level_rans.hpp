// The entropy coder of levels: interleaved range asymmetric numeral systems (rANS, Duda 2013), with 32-bit states,
// 16-bit words and 12-bit frequencies. (plane_rans is the other one: more states and frequencies of 11 bits, for byte
// planes.)
//
// Note: rANS is last in, first out. The encoder takes the values from the last to the first and writes words
// backwards from the end of its buffer; the decoder reads both forwards. Value i belongs to state i % states, so that a
// decoder has several independent chains of work. Between values a state is in [2^16, 2^32).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

namespace dynaquant::level_rans {

inline constexpr unsigned frequency_bits = 12;
inline constexpr std::uint32_t frequency_total = 1u << frequency_bits;
inline constexpr std::uint32_t lowest_state = 1u << 16;

// One symbol's share of the 4096 slots: `frequency` slots, at least one, from slot `begin` on. To divide a state by the
// frequency, it multiplies with a 64-bit inverse, which is exact for every state.
class Share {
public:
    Share() = default;
    Share(std::uint32_t frequency, std::uint32_t begin)
        : inverse_(frequency == 1 ? ~std::uint64_t{0} : ~std::uint64_t{0} / frequency + 1),
          frequency_(frequency),
          // The inverse of 1 does not fit into 64 bits. The one used instead gives x - 1, which this corrects.
          begin_(frequency == 1 ? begin + frequency_total - 1 : begin) {}

    std::uint32_t frequency() const { return frequency_; }

    // (x / frequency) · 4096 + x % frequency + begin
    std::uint32_t push(std::uint32_t x) const {
        const auto quotient = static_cast<std::uint32_t>(static_cast<unsigned __int128>(inverse_) * x >> 64);
        return x + begin_ + quotient * (frequency_total - frequency_);
    }

private:
    std::uint64_t inverse_ = 0;
    std::uint32_t frequency_ = 0;
    std::uint32_t begin_ = 0;
};

// A value takes at most one word, so `room` needs as many words as there are values.
template <unsigned States>
class RansEncoder {
public:
    explicit RansEncoder(std::span<std::uint16_t> room) : first_(room.data() + room.size()), end_(first_) {
        std::fill_n(states_, States, lowest_state);
    }

    // Call it for the last value first. state: index of the value % States.
    void put(unsigned state, const Share& share) {
        std::uint32_t x = states_[state];
        if (x >> (32 - frequency_bits) >= share.frequency()) {  // else it would grow beyond 32 bits
            *--first_ = static_cast<std::uint16_t>(x);
            x >>= 16;
        }
        states_[state] = share.push(x);
    }

    // Appends the states, then the words in the order in which a decoder reads them.
    void finish(std::vector<std::uint8_t>& out) const {
        const auto put16 = [&](std::uint32_t word) {
            out.push_back(static_cast<std::uint8_t>(word));
            out.push_back(static_cast<std::uint8_t>(word >> 8));
        };
        out.reserve(out.size() + 4 * States + 2 * static_cast<std::size_t>(end_ - first_));
        for (const auto x : states_) {
            put16(x & 0xffffu);
            put16(x >> 16);
        }
        for (const std::uint16_t* word = first_; word != end_; ++word) put16(*word);
    }

private:
    std::uint32_t states_[States];
    std::uint16_t* first_;
    const std::uint16_t* end_;
};

// What a decoder needs for one of the 4096 slots: 8 bits symbol, 12 bits frequency - 1, 12 bits slot - begin.
using Slot = std::uint32_t;

inline Slot slot_of(std::uint32_t symbol, std::uint32_t frequency, std::uint32_t offset) {
    return symbol << 24 | (frequency - 1) << 12 | offset;
}

// Never reads outside its bytes: a missing word counts as 0, and `expect_end` throws later.
template <unsigned States>
class RansDecoder {
public:
    explicit RansDecoder(std::span<const std::uint8_t> bytes) : next_(bytes.data()), end_(bytes.data() + bytes.size()) {
        if (bytes.size() < 4 * States) throw std::invalid_argument("the coded levels end too early");
        for (auto& x : states_) {
            x = get16();
            x |= get16() << 16;
            if (x < lowest_state) throw std::invalid_argument("the coded levels begin with a state that is too low");
        }
    }

    std::uint32_t get(unsigned state, const Slot* table) {
        const Slot slot = table[states_[state] & (frequency_total - 1)];
        std::uint32_t x = pop(slot, states_[state]);
        if (x < lowest_state) x = x << 16 | get16();
        states_[state] = x;
        return slot >> 24;
    }

    // Whether `get_unchecked` may be called for this number of values.
    bool has(std::size_t values) const { return static_cast<std::size_t>(end_ - next_) >= 2 * values; }

    std::uint32_t get_unchecked(unsigned state, const Slot* table) {
        const Slot slot = table[states_[state] & (frequency_total - 1)];
        std::uint32_t x = pop(slot, states_[state]);
        if (x < lowest_state) {
            x = x << 16 | next_[0] | static_cast<std::uint32_t>(next_[1]) << 8;
            next_ += 2;
        }
        states_[state] = x;
        return slot >> 24;
    }

    // Throws unless all words have been read and every state has the value with which the encoder began.
    void expect_end() const {
        if (next_ != end_ || missing_)
            throw std::invalid_argument("the coded levels have another length than their values");
        for (const auto x : states_)
            if (x != lowest_state) throw std::invalid_argument("the coded levels are damaged");
    }

private:
    static std::uint32_t pop(Slot slot, std::uint32_t x) {
        return ((slot >> 12 & 0xfffu) + 1) * (x >> frequency_bits) + (slot & 0xfffu);
    }

    std::uint32_t get16() {
        if (end_ - next_ < 2) {
            missing_ = true;
            return 0;
        }
        const std::uint32_t word = next_[0] | static_cast<std::uint32_t>(next_[1]) << 8;
        next_ += 2;
        return word;
    }

    const std::uint8_t* next_;
    const std::uint8_t* end_;
    std::uint32_t states_[States];
    bool missing_ = false;
};

}  // namespace dynaquant::level_rans
