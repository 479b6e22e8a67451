// Frequency tables of symbols. They add up to 4096 for rANS and take few bits (docs/format.md, "Frequency tables").
#pragma once

#include <array>
#include <cstdint>

#include "bits.hpp"
#include "level_rans.hpp"

namespace dynaquant::level_rans {

using Counts = std::array<std::uint64_t, 256>;
using Frequencies = std::array<std::uint32_t, 256>;

// Returns frequencies that add up to 4096, at least 1 for each symbol that occurs. put_frequencies can write them
// without loss. Returns all zeros if no symbol occurs.
Frequencies scaled(const Counts& counts);

void put_frequencies(BitWriter& out, const Frequencies& frequencies);

// Throws std::invalid_argument if the frequencies do not add up to 4096 or if a symbol is not below `symbols`.
Frequencies get_frequencies(BitReader& in, std::size_t symbols);

// Returns the bits that the symbols take with these frequencies, plus the bits of the table.
double bits_of(const Counts& counts, const Frequencies& frequencies);

}  // namespace dynaquant::level_rans
