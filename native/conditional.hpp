// Levels to bytes and back given the parent's levels, by conditional entropy coding (method 2.2; docs/format.md,
// "Conditional levels").
//
// Two tables make it the same code for every quantizer. The level of a value becomes a symbol by its parent's level:
// symbol 0 is the level nearest to the parent's value, 1 the next, and so on. And every parent level has a context;
// contexts stand in an order in which neighbours are alike, so that few groups of them need a table of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dynaquant {

// Levels per block, the unit of parallel work and of the format.
inline constexpr std::size_t conditional_block = std::size_t{1} << 17;

// For each of 256 parent levels a row of 256 entries.
using LevelTable = std::span<const std::uint8_t, 65536>;
using ContextTable = std::span<const std::uint8_t, 256>;

// parent: empty, which counts as all 0, or as long as levels. symbol_of: the symbol of each level, by parent level.
// context_of: the context of each parent level, below contexts. Throws std::invalid_argument when this does not fit.
std::vector<std::uint8_t> encode_conditional(std::span<const std::uint8_t> levels,
                                             std::span<const std::uint8_t> parent, LevelTable symbol_of,
                                             ContextTable context_of, std::size_t contexts);

// The inverse: fills levels. level_of: the level of each symbol below symbols, by parent level. Reads nothing outside
// stream and parent, whatever they hold; throws std::invalid_argument when the stream is not what encode_conditional
// would have written for so many levels.
void decode_conditional(std::span<const std::uint8_t> stream, std::span<const std::uint8_t> parent, LevelTable level_of,
                        ContextTable context_of, std::size_t contexts, std::size_t symbols,
                        std::span<std::uint8_t> levels);

}  // namespace dynaquant
