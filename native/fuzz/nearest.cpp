// Fuzzes the table of a conditional coder, which is made from the codebooks of a file: nearest.
//
// Input: whether there is a parent (the lowest bit of 1 byte), number of positions (2), number of sources (2); the
// positions, then the sources, as float64. Both are filled up with zeros.
#include "../nearest.hpp"

#include <array>
#include <bit>

#include "../tables.hpp"
#include "input.hpp"

using namespace dynaquant;

namespace {

std::vector<double> numbers(fuzz::Input& input, std::size_t count) {
    std::vector<double> out(count);
    for (auto& value : out) value = std::bit_cast<double>(input.number(8));
    return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    const bool is_parent = input.number(1) % 2 == 1;
    const std::size_t symbols = input.number(2) % 300, source_count = input.number(2) % 300;
    const auto positions = numbers(input, symbols), sources = numbers(input, source_count);

    constexpr std::size_t budget = std::size_t{1} << 16;
    const auto table = fuzz::decoded(65536, budget, [&](std::span<std::uint8_t> out) {
        nearest_levels(positions, sources, is_parent, out.first<65536>());
    });
    if (table.empty()) return 0;
    const std::span<const std::uint8_t, 65536> level_of(table);
    const auto symbol_of = fuzz::decoded(65536, budget, [&](std::span<std::uint8_t> out) {
        symbols_of_levels(level_of, symbols, out.first<65536>());
    });
    for (std::size_t row = 0; row < 65536; row += 256)
        for (std::size_t symbol = 0; symbol < symbols; ++symbol)
            fuzz::require(level_of[row + symbol] < symbols && symbol_of[row + level_of[row + symbol]] == symbol,
                          "each row holds every level once");
    return 0;
}
