// Canonical Huffman codes of at most 12 bits.
#include "huffman.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

namespace dynaquant {
namespace {

std::uint16_t reversed(std::uint32_t code, unsigned length) {
    std::uint32_t out = 0;
    for (unsigned i = 0; i < length; ++i) out |= ((code >> i) & 1u) << (length - 1 - i);
    return static_cast<std::uint16_t>(out);
}

// Returns the canonical code of every symbol, bit-reversed. Codes are assigned by length, then by symbol.
std::vector<std::uint16_t> canonical_codes(std::span<const std::uint8_t> lengths) {
    std::array<std::uint32_t, max_code_length + 2> next{};
    for (const auto length : lengths)
        if (length > 0) ++next[length + 1u];
    for (unsigned l = 1; l <= max_code_length; ++l) next[l + 1] = (next[l + 1] + next[l]) << 1;
    std::vector<std::uint16_t> codes(lengths.size());
    for (std::size_t s = 0; s < lengths.size(); ++s)
        if (lengths[s] > 0) codes[s] = reversed(next[lengths[s]]++, lengths[s]);
    return codes;
}

}  // namespace

std::vector<std::uint8_t> code_lengths(std::span<const std::uint64_t> frequencies) {
    std::vector<std::size_t> symbols;
    for (std::size_t s = 0; s < frequencies.size(); ++s)
        if (frequencies[s] > 0) symbols.push_back(s);
    std::vector<std::uint8_t> lengths(frequencies.size());
    if (symbols.size() <= 1) {
        for (const auto s : symbols) lengths[s] = 1;
        return lengths;
    }
    std::sort(symbols.begin(), symbols.end(), [&](std::size_t a, std::size_t b) {
        return frequencies[a] != frequencies[b] ? frequencies[a] < frequencies[b] : a < b;
    });
    // Package-merge: each level pairs the packages of the level below and merges the pairs with the symbols. The code
    // length of a symbol is how often it is in the 2(n-1) lightest packages of the top level. Symbols have the same
    // order in every level, so it is enough to remember which entries are symbols and to count them from the top down.
    std::vector<std::uint64_t> leaves;
    for (const auto s : symbols) leaves.push_back(frequencies[s]);
    std::vector<std::uint64_t> level = leaves;
    std::array<std::vector<bool>, max_code_length> is_leaf;
    is_leaf[0].assign(leaves.size(), true);
    for (unsigned depth = 1; depth < max_code_length; ++depth) {
        std::vector<std::uint64_t> merged;
        auto leaf = leaves.begin();
        for (std::size_t i = 0; i + 1 < level.size(); i += 2) {
            const std::uint64_t pair = level[i] + level[i + 1];
            for (; leaf != leaves.end() && *leaf <= pair; ++leaf) {
                merged.push_back(*leaf);
                is_leaf[depth].push_back(true);
            }
            merged.push_back(pair);
            is_leaf[depth].push_back(false);
        }
        merged.insert(merged.end(), leaf, leaves.end());
        is_leaf[depth].insert(is_leaf[depth].end(), static_cast<std::size_t>(leaves.end() - leaf), true);
        level = std::move(merged);
    }
    std::size_t taken = 2 * (symbols.size() - 1);
    for (unsigned depth = max_code_length; depth-- > 0;) {
        const auto begin = is_leaf[depth].begin();
        const auto taken_leaves =
            static_cast<std::size_t>(std::count(begin, begin + static_cast<std::ptrdiff_t>(taken), true));
        for (std::size_t i = 0; i < taken_leaves; ++i) ++lengths[symbols[i]];
        taken = 2 * (taken - taken_leaves);
    }
    return lengths;
}

void put_lengths(BitWriter& out, std::span<const std::uint8_t> lengths) {
    for (std::size_t i = 0; i < lengths.size();) {
        out.put(lengths[i], 4);
        if (lengths[i] != 0) {
            ++i;
            continue;
        }
        std::size_t run = 1;
        while (run < 16 && i + run < lengths.size() && lengths[i + run] == 0) ++run;
        out.put(static_cast<std::uint32_t>(run - 1), 4);
        i += run;
    }
}

std::size_t size_of_lengths(std::span<const std::uint8_t> lengths) {
    std::size_t bits = 0;
    for (std::size_t i = 0; i < lengths.size();) {
        std::size_t run = 1;
        if (lengths[i] == 0)
            while (run < 16 && i + run < lengths.size() && lengths[i + run] == 0) ++run;
        bits += lengths[i] == 0 ? 8 : 4;
        i += run;
    }
    return bits;
}

std::vector<std::uint8_t> get_lengths(BitReader& in, std::size_t symbols) {
    std::vector<std::uint8_t> lengths;
    while (lengths.size() < symbols) {
        const auto length = static_cast<std::uint8_t>(in.get(4));
        const std::size_t times = length == 0 ? in.get(4) + 1 : 1;
        if (length > max_code_length || lengths.size() + times > symbols)
            throw std::invalid_argument("the Huffman table of the coded levels is broken");
        lengths.insert(lengths.end(), times, length);
    }
    std::uint32_t used = 0, occurring = 0;
    for (const auto length : lengths)
        if (length > 0) used += 1u << (max_code_length - length), ++occurring;
    const std::uint32_t whole = 1u << max_code_length;
    if (!(occurring == 0 || (occurring == 1 && used == whole / 2) || used == whole))
        throw std::invalid_argument("the Huffman table of the coded levels is not a prefix code");
    return lengths;
}

HuffmanEncoder::HuffmanEncoder(std::span<const std::uint8_t> lengths)
    : lengths_(lengths.begin(), lengths.end()), codes_(canonical_codes(lengths)) {}

HuffmanDecoder::HuffmanDecoder(std::span<const std::uint8_t> lengths) : table_(std::size_t{1} << max_code_length) {
    const auto codes = canonical_codes(lengths);
    for (std::size_t s = 0; s < lengths.size(); ++s) {
        if (lengths[s] == 0) continue;
        for (std::size_t i = codes[s]; i < table_.size(); i += std::size_t{1} << lengths[s])
            table_[i] = {static_cast<std::uint16_t>(s), lengths[s]};
    }
}

}  // namespace dynaquant
