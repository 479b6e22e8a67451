// Fuzzes the step from decoded levels to values: tables.
//
// Input: whether values have 16 bits rather than 32 (the lowest bit of 1 byte), number of values in the table (2 bytes),
// of levels (3), of bytes of the levels (3), how many protected values more than protected levels there are (1, signed);
// the table; the levels, which are repeated up to their number; the rest is the protected values, of 2 bytes each.
#include <algorithm>

#include "../tables.hpp"
#include "input.hpp"

using namespace dynaquant;

namespace {

template <class Bits>
void fill_values(fuzz::Input& input) {
    std::vector<Bits> table(input.number(2) % 300);
    const std::size_t count = input.number(3) % 70'000, given = input.number(3);
    const auto more = static_cast<std::int8_t>(input.number(1));
    for (auto& value : table) value = static_cast<Bits>(input.number(sizeof(Bits)));
    const auto levels = input.tiled(given, count);
    const auto wanted = std::count(levels.begin(), levels.end(), level_protected);
    std::vector<std::uint16_t> protected_values(static_cast<std::size_t>(std::max<std::ptrdiff_t>(wanted + more, 0)));
    for (auto& value : protected_values) value = static_cast<std::uint16_t>(input.number(2));

    std::vector<Bits> first(levels.size()), second(levels.size(), static_cast<Bits>(~Bits{0}));
    const auto fill = [&](std::vector<Bits>& out) {
        return fuzz::returns(1 << 16, [&] { values_of_levels<Bits>(levels, table, protected_values, out); });
    };
    if (!fill(first)) return;
    fuzz::require(fill(second) && first == second, "every value is filled");
    fuzz::require(protected_values.size() == static_cast<std::size_t>(wanted), "there are as many protected values as protected levels");
    auto next = protected_values.begin();
    for (std::size_t i = 0; i < levels.size(); ++i) {
        constexpr unsigned shift = 8 * sizeof(Bits) - 16;
        const bool is_protected = levels[i] == level_protected;
        const auto value = is_protected ? static_cast<Bits>(static_cast<Bits>(*next++) << shift) : table[levels[i]];
        fuzz::require(first[i] == value, "a level has the value of the table, or the next protected one");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Input input(data, size);
    input.number(1) % 2 == 1 ? fill_values<std::uint16_t>(input) : fill_values<std::uint32_t>(input);
    return 0;
}
