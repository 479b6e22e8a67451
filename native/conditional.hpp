// Levels to bytes and back: entropy coding conditioned on the parent's levels (method 2.2; docs/format.md, "Conditional
// levels").
//
// Two tables describe the quantizer, so the same code serves all of them. The first table turns a level into a symbol,
// depending on the parent's level: symbol 0 is the level nearest to the parent's value, 1 the next, and so on. The
// second table has a context for every parent level. Neighbouring contexts are similar, so groups of them share one
// frequency table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace dynaquant {

// Levels in a block; tensors of more levels have wide blocks. A block is a unit of parallel work and of the format.
inline constexpr std::size_t conditional_block = std::size_t{1} << 17;

// A row of 256 entries for each of 256 parent levels.
using LevelTable = std::span<const std::uint8_t, 65536>;
using ContextTable = std::span<const std::uint8_t, 256>;

// Returns the coded levels. parent: as long as levels, or empty, which counts as all 0. symbol_of: for each parent
// level, the symbol of each level. context_of: the context of each parent level. contexts: how many there are.
// least_gain: if the parent saves a smaller share of the bits, returns nothing. Throws std::invalid_argument if the
// arguments do not fit each other.
std::optional<std::vector<std::uint8_t>> encode_conditional(std::span<const std::uint8_t> levels,
                                                            std::span<const std::uint8_t> parent, LevelTable symbol_of,
                                                            ContextTable context_of, std::size_t contexts,
                                                            std::optional<double> least_gain = std::nullopt);

// The inverse: fills levels. level_of: for each parent level, the level of each symbol. symbols: how many there are.
// Never reads outside stream and parent, whatever they hold. Throws std::invalid_argument if encode_conditional cannot
// have written the stream for this number of levels.
void decode_conditional(std::span<const std::uint8_t> stream, std::span<const std::uint8_t> parent, LevelTable level_of,
                        ContextTable context_of, std::size_t contexts, std::size_t symbols,
                        std::span<std::uint8_t> levels);

}  // namespace dynaquant
