// Fuzzes the decoder of levels conditioned on the parent's, with all instructions that the processor has: conditional,
// contexts, frequencies, level_rans, level_steps.
//
// Input: number of symbols (2 bytes), of contexts (2), of levels (3), of bytes of the contexts (1), of bytes of the
// parent (3); the contexts of the parent levels, repeated up to 256; the parent's levels, repeated up to the number of
// levels (none: no parent); the rest is the stream.
#include "../conditional.hpp"

#include "../cpu.hpp"
#include "input.hpp"

using namespace dynaquant;

namespace {

// The level of a symbol, and the symbol of a level: the decoder only looks them up, so any table will do.
const fuzz::Bytes table = [] {
    fuzz::Bytes levels(65536);
    for (std::size_t i = 0; i < levels.size(); ++i) levels[i] = static_cast<std::uint8_t>(i ^ i >> 8);
    return levels;
}();

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const std::size_t symbols = input.number(2), contexts = input.number(2);
    // Few inputs have as many levels as a block with many states, because these take long.
    const std::size_t levels_wanted = input.number(3), most = (std::size_t{1} << 20) + 4096;
    const std::size_t count = levels_wanted % (levels_wanted % 8 == 0 ? most : conditional_block + 4096);
    const std::size_t given_contexts = input.number(1), given_parent = input.number(3);
    auto context_of = input.tiled(given_contexts, 256);
    context_of.resize(256);
    const auto parent = input.tiled(given_parent, count);
    const auto stream = input.rest();

    // Each context may have a table of 16 KiB.
    const std::size_t budget = (std::size_t{1} << 17) + 8 * (stream.size() + count) + (std::size_t{1} << 14) * contexts;
    const LevelTable levels_of(table);
    const ContextTable contexts_of(context_of);
    const auto decode = [&](std::span<const std::uint8_t> from) {
        return fuzz::decoded(count, budget, [&](auto out) {
            decode_conditional(from, parent, levels_of, contexts_of, contexts, symbols, out);
        });
    };
    const auto levels = decode(stream);
    if (count > conditional_block) {
        for (int less = 0; less < static_cast<int>(supported_instructions()); ++less) {
            limit_instructions(static_cast<Instructions>(less));
            fuzz::require(decode(stream) == levels, "levels do not depend on the instructions");
        }
        limit_instructions(supported_instructions());
    }
    if (levels.empty()) return 0;
    const auto again = encode_conditional(levels, parent, levels_of, contexts_of, contexts);
    fuzz::require(decode(*again) == levels, "levels that were decoded can be encoded");
    return 0;
}
