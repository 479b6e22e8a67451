// Look-ups in tables of 256 bytes that stay in AVX-512 registers.
#pragma once

#include "cpu.hpp"

#ifdef DYNAQUANT_X86

#include <array>
#include <cstdint>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own header
#endif

namespace dynaquant {

struct ByteTable {
    __m512i quarter[4];
};

DYNAQUANT_AVX512 inline ByteTable byte_table(const std::array<std::uint8_t, 256>& bytes) {
    ByteTable table;
    for (unsigned q = 0; q < 4; ++q) table.quarter[q] = _mm512_loadu_si512(bytes.data() + 64 * q);
    return table;
}

// Returns the byte of the table for each byte of the index.
DYNAQUANT_AVX512 inline __m512i look_up(const ByteTable& table, __m512i index) {
    const __m512i low = _mm512_permutex2var_epi8(table.quarter[0], index, table.quarter[1]);
    const __m512i high = _mm512_permutex2var_epi8(table.quarter[2], index, table.quarter[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
}

}  // namespace dynaquant

#endif
