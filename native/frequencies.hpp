// Frequency tables of symbols: scaled to 4096 for rANS, and written in few bits (docs/format.md, "Frequency tables").
#pragma once

#include <array>
#include <cstdint>

#include "bits.hpp"
#include "level_rans.hpp"

namespace dynaquant::level_rans {

using Counts = std::array<std::uint64_t, 256>;
using Frequencies = std::array<std::uint32_t, 256>;

// Frequencies that add up to 4096, at least 1 where a symbol occurs, of which put_frequencies can write every one.
// All zero when nothing occurs.
Frequencies scaled(const Counts& counts);

void put_frequencies(BitWriter& out, const Frequencies& frequencies);

// Throws std::invalid_argument unless they add up to 4096 and only symbols below `symbols` occur.
Frequencies get_frequencies(BitReader& in, std::size_t symbols);

// Bits of the symbols when coded with these frequencies, and of the table.
double bits_of(const Counts& counts, const Frequencies& frequencies);

}  // namespace dynaquant::level_rans
