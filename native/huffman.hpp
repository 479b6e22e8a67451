// Canonical Huffman codes of at most 12 bits (docs/format.md, "Huffman tables").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "bits.hpp"

namespace dynaquant {

inline constexpr unsigned max_code_length = 12;

// Optimal code lengths under the limit (package-merge, Larmore and Hirschberg 1990). A symbol that does not occur has
// length 0; a single occurring symbol has length 1.
std::vector<std::uint8_t> code_lengths(std::span<const std::uint64_t> frequencies);

// Writes the lengths with four bits each. A run of up to 16 zero lengths takes eight bits.
void put_lengths(BitWriter& out, std::span<const std::uint8_t> lengths);

// Returns the number of bits that put_lengths writes.
std::size_t size_of_lengths(std::span<const std::uint8_t> lengths);

// Reads `symbols` lengths. Throws std::invalid_argument unless they form a complete prefix code, are all zero, or are
// zero but for a single 1. So every bit pattern has at most one meaning.
std::vector<std::uint8_t> get_lengths(BitReader& in, std::size_t symbols);

class HuffmanEncoder {
public:
    explicit HuffmanEncoder(std::span<const std::uint8_t> lengths);
    void put(BitWriter& out, std::size_t symbol) const { out.put(codes_[symbol], lengths_[symbol]); }

private:
    std::vector<std::uint8_t> lengths_;
    std::vector<std::uint16_t> codes_;  // bit-reversed: the first bit of the code is the lowest
};

class HuffmanDecoder {
public:
    explicit HuffmanDecoder(std::span<const std::uint8_t> lengths);

    std::size_t get(BitReader& in) const {
        const Entry entry = table_[in.peek(max_code_length)];
        if (entry.length == 0) throw std::invalid_argument("the coded levels hold a code that is not in their table");
        in.take(entry.length);
        return entry.symbol;
    }

    // Returns the next symbol without consuming bits. Past the end it may be any symbol.
    std::size_t peek(BitReader& in) const { return table_[in.peek(max_code_length)].symbol; }

private:
    struct Entry {
        std::uint16_t symbol = 0;
        std::uint16_t length = 0;
    };
    std::vector<Entry> table_;
};

}  // namespace dynaquant
