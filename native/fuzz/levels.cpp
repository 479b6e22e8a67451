// Fuzzes the decoder of the published coding of levels: levels, huffman, runs.
//
// Input: modulus (2 bytes), groups (2), number of levels (3), number of bytes of the parent (3), these bytes, which are
// repeated up to the number of levels (none: no parent); the rest is the stream.
#include "../levels.hpp"

#include "input.hpp"

using namespace dynaquant;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t modulus = input.number(2), groups = input.number(2);
    const std::size_t count = input.number(3) % (levels_block + 4096), given = input.number(3);
    const auto parent = input.tiled(given, count);
    const auto stream = input.rest();

    // Each group has a Huffman table of 16 KiB.
    const std::size_t budget = (std::size_t{1} << 16) + 8 * (stream.size() + count) + (std::size_t{1} << 15) * groups;
    const auto decode = [&](std::span<const std::uint8_t> from) {
        return fuzz::decoded(count, budget, [&](auto out) { decode_levels(from, parent, modulus, groups, out); });
    };
    const auto levels = decode(stream);
    if (levels.empty()) return 0;
    for (const bool run_length : {false, true})
        fuzz::require(decode(encode_levels(levels, parent, modulus, groups, run_length)) == levels,
                      "levels that were decoded can be encoded");
    return 0;
}
