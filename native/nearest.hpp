// The table of a conditional coder: for each parent level, the levels sorted by their distance (docs/format.md,
// "Conditional levels").
#pragma once

#include <cstdint>
#include <span>

namespace dynaquant {

// Fills level_of: for each of 256 parent levels, a row with the level of each of 256 symbols.
//
// positions: the levels on a line. sources: the parent's levels on that line. is_parent: false if there is no parent
// and sources has a single position that replaces it.
//
// A row has the levels in the order of their distance from the parent's level. Of two equally near levels the one
// nearer to zero comes first. level_protected is the last of a row, or the first if the parent's level is
// level_protected. The rest of a row is 0. Rows beyond the parent's levels have all levels in ascending order.
//
// Throws std::invalid_argument if there are more than 256 levels or sources, fewer than the two levels that are not
// bins, no source, or if a position is not finite.
void nearest_levels(std::span<const double> positions, std::span<const double> sources, bool is_parent,
                    std::span<std::uint8_t, 65536> level_of);

// Inverts a table of nearest_levels: for each of 256 parent levels, a row with the symbol of each level.
void symbols_of_levels(std::span<const std::uint8_t, 65536> level_of, std::size_t symbols,
                       std::span<std::uint8_t, 65536> symbol_of);

}  // namespace dynaquant
