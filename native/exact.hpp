// Exact values to bytes and back, given the parent's values: differences, byte planes, rANS (docs/format.md, "Exact
// values").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dynaquant {

// Elements per block, the unit of parallel work and of the format.
inline constexpr std::size_t exact_block = std::size_t{1} << 16;

// The stream of elements of 1, 2, 4 or 8 bytes, in pieces that follow each other: joining them here would cost a copy
// of it all. parent: empty, or as long as data.
std::vector<std::vector<std::uint8_t>> encode_exact(std::span<const std::uint8_t> data,
                                                    std::span<const std::uint8_t> parent, std::size_t itemsize);

// The inverse: fills data from the stream. parent: as for encode_exact, or empty for a stream that does without. Reads
// nothing outside stream and parent, whatever they hold; throws std::invalid_argument when the stream is not what
// encode_exact would have written for so many bytes.
void decode_exact(std::span<const std::uint8_t> stream, std::span<const std::uint8_t> parent, std::size_t itemsize,
                  std::span<std::uint8_t> data);

}  // namespace dynaquant
