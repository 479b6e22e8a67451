// Levels to bytes and back, given the parent's levels: delta, rearrangement by source level, run length, Huffman
// (method 1.5; the bytes are described in docs/format.md, "Coded levels").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dynaquant {

// Levels per block, the unit of parallel work and of the format.
inline constexpr std::size_t levels_block = std::size_t{1} << 16;

// parent: empty, or as long as levels. All levels of both are below modulus ≤ 256. groups: 1, or a number above every
// level of the parent, in which case the deltas of each source level form a group. run_length: whether groups may use
// run lengths; each then uses them where they save bits. Throws std::invalid_argument when the levels do not fit this.
std::vector<std::uint8_t> encode_levels(std::span<const std::uint8_t> levels, std::span<const std::uint8_t> parent,
                                        std::size_t modulus, std::size_t groups, bool run_length);

// The inverse: fills levels from the stream. Reads nothing outside stream and parent, whatever they hold; throws
// std::invalid_argument when the stream is not what encode_levels would have written for so many levels.
void decode_levels(std::span<const std::uint8_t> stream, std::span<const std::uint8_t> parent, std::size_t modulus,
                   std::size_t groups, std::span<std::uint8_t> levels);

}  // namespace dynaquant
