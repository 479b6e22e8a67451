// Where eight lanes of a vector read words or write them, if only some of the lanes do.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace dynaquant {

// For each of the 256 sets of lanes, a number for each lane.
using LaneOrders = std::array<std::array<std::uint8_t, 8>, 256>;

// For every set of lanes that need a word: the index of the word that each lane takes. Lanes that need none have 255.
inline constexpr LaneOrders word_of_lane = [] {
    LaneOrders table{};
    for (unsigned mask = 0; mask < 256; ++mask) {
        std::uint8_t word = 0;
        for (unsigned lane = 0; lane < 8; ++lane) table[mask][lane] = mask >> lane & 1 ? word++ : std::uint8_t{255};
    }
    return table;
}();

// For every set of lanes that write a word: these lanes at the end, in their order.
inline constexpr LaneOrders lane_of_word = [] {
    LaneOrders table{};
    for (unsigned mask = 0; mask < 256; ++mask) {
        unsigned word = 8 - static_cast<unsigned>(std::popcount(mask));
        for (std::uint8_t lane = 0; lane < 8; ++lane)
            if (mask >> lane & 1) table[mask][word++] = lane;
    }
    return table;
}();

}  // namespace dynaquant
