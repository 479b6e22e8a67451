// Fuzzes the decoder of exact values: lossless, plane_rans, plane_rans_steps, element_planes.
//
// Input: bytes of an element (1 byte), number of elements (3), number of bytes of the parent (3), these bytes, which are
// repeated up to the size of the elements (none: no parent); the rest is the stream.
#include "../lossless.hpp"

#include "input.hpp"

using namespace dynaquant;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t itemsize = input.number(1) % 17;
    const std::size_t count = input.number(3) % (lossless_block + 4096) * itemsize, given = input.number(3);
    const auto parent = input.tiled(given, count);
    const auto stream = input.rest();

    // A thread keeps the planes of a block and other memory of its size.
    const std::size_t budget = (std::size_t{1} << 22) + 8 * (stream.size() + count);
    const auto decode = [&](std::span<const std::uint8_t> from) {
        return fuzz::decoded(count, budget, [&](auto out) { decode_lossless(from, parent, itemsize, out); });
    };
    const auto values = decode(stream);
    bool same = false;
    const fuzz::Bytes wanted = values.empty() ? fuzz::Bytes(count) : values;
    const bool returned = fuzz::returns(budget, [&] { same = decodes_to(stream, parent, itemsize, wanted); });
    if (count == 0) return 0;
    fuzz::require(returned == !values.empty(), "decodes_to refuses what decode_lossless refuses");
    if (values.empty()) return 0;
    fuzz::require(same, "decodes_to finds the values that decode_lossless fills in");
    fuzz::Bytes again;
    for (const auto& piece : encode_lossless(values, parent, itemsize))
        again.insert(again.end(), piece.begin(), piece.end());
    fuzz::require(decode(again) == values, "values that were decoded can be encoded");
    return 0;
}
