// The table that tells a conditional coder how near levels are to those of the parent (docs/format.md, "Conditional
// levels").
#pragma once

#include <cstdint>
#include <span>

namespace dynaquant {

// For each of 256 parent levels a row of 256 levels by symbol. positions: where the levels lie on a line; sources: where
// those of the parent do. Rows of parent levels that there are hold the levels by their distance, of two equally near
// ones that nearer to zero first; level_protected is the last, or, for a parent that is one, the first. is_parent:
// whether sources are those of a parent, rather than a single one that stands for none. What is behind the levels of a
// row is 0; rows behind those of the parent hold all levels in their order. Throws std::invalid_argument for more than
// 256 levels of either, for fewer than the two that are no bins, and for a position that is no number.
void nearest_levels(std::span<const double> positions, std::span<const double> sources, bool is_parent,
                    std::span<std::uint8_t, 65536> level_of);

// The inverse of what nearest_levels made: a row of symbols by level for each of 256 parent levels.
void symbols_of_levels(std::span<const std::uint8_t, 65536> level_of, std::size_t symbols,
                       std::span<std::uint8_t, 65536> symbol_of);

}  // namespace dynaquant
