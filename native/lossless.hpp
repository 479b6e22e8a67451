// Exact values to bytes and back, conditioned on the parent's values: differences, byte planes, rANS (docs/format.md,
// "Exact values").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dynaquant {

// Elements per block. A block is a unit of parallel work and of the format.
inline constexpr std::size_t lossless_block = std::size_t{1} << 16;

// Returns the stream of elements of 1, 2, 4 or 8 bytes, as consecutive pieces: joining them here would cost a copy.
// parent: empty, or as long as data.
std::vector<std::vector<std::uint8_t>> encode_lossless(std::span<const std::uint8_t> data,
                                                       std::span<const std::uint8_t> parent, std::size_t itemsize);

// The inverse: fills data from the stream. parent: as for encode_lossless; may be empty if the stream does not need it.
// Never reads outside stream and parent, whatever they hold. Throws std::invalid_argument if encode_lossless cannot
// have written the stream for this number of bytes.
void decode_lossless(std::span<const std::uint8_t> stream, std::span<const std::uint8_t> parent, std::size_t itemsize,
                     std::span<std::uint8_t> data);

// Whether decode_lossless would fill in these data. Needs no memory for them; throws as decode_lossless does.
bool decodes_to(std::span<const std::uint8_t> stream, std::span<const std::uint8_t> parent, std::size_t itemsize,
                std::span<const std::uint8_t> data);

}  // namespace dynaquant
