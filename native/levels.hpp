// Levels to bytes and back as published: deltas to the parent's levels, rearranged by parent level, with run lengths
// and Huffman codes (method 1.5; docs/format.md, "Coded levels").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dynaquant {

// Levels per block. A block is a unit of parallel work and of the format.
inline constexpr std::size_t levels_block = std::size_t{1} << 16;

// Returns the coded levels. parent: empty, or as long as levels. modulus: above all levels of both, at most 256.
// groups: 1, or above every level of the parent; then the deltas of each parent level form a group. run_length: whether
// a group may use run lengths, if they save bits. Throws std::invalid_argument if the arguments do not fit each other.
std::vector<std::uint8_t> encode_levels(std::span<const std::uint8_t> levels, std::span<const std::uint8_t> parent,
                                        std::size_t modulus, std::size_t groups, bool run_length);

// The inverse: fills levels from the stream. Never reads outside stream and parent, whatever they hold. Throws
// std::invalid_argument if encode_levels cannot have written the stream for this number of levels.
void decode_levels(std::span<const std::uint8_t> stream, std::span<const std::uint8_t> parent, std::size_t modulus,
                   std::size_t groups, std::span<std::uint8_t> levels);

}  // namespace dynaquant
