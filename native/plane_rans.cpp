// The entropy coder of byte planes: frequency tables, states and words of one plane.
#include "plane_rans.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "plane_rans_steps.hpp"

namespace dynaquant::plane_rans {
namespace {

using Bytes = std::span<const std::uint8_t>;

std::vector<EncoderStep> encoder_steps(std::span<const Frequencies> tables) {
    std::vector<EncoderStep> steps(tables.size() * byte_values);
    for (std::size_t c = 0; c < tables.size(); ++c) {
        std::uint32_t start = 0;
        for (std::size_t s = 0; s < byte_values; ++s) {
            if (tables[c][s] == 0) continue;
            steps[c * byte_values + s] = step_of(start, tables[c][s]);
            start += tables[c][s];
        }
    }
    return steps;
}

// Writes 1 to 16 zeros as 0000 and their number minus one. Writes another frequency as its width and the bits below the
// highest one.
void put_table(BitWriter& out, const Frequencies& table) {
    for (std::size_t s = 0; s < byte_values;) {
        if (table[s] == 0) {
            std::size_t run = 1;
            while (run < 16 && s + run < byte_values && table[s + run] == 0) ++run;
            out.put(0, 4);
            out.put(static_cast<std::uint32_t>(run - 1), 4);
            s += run;
            continue;
        }
        const auto width = static_cast<unsigned>(std::bit_width(table[s]));
        out.put(width, 4);
        out.put(table[s] - (1u << (width - 1)), width - 1);
        ++s;
    }
}

Frequencies get_table(BitReader& in) {
    Frequencies table{};
    std::uint32_t sum = 0;
    for (std::size_t s = 0; s < byte_values;) {
        const unsigned width = in.get(4);
        const std::size_t run = width == 0 ? in.get(4) + 1 : 1;
        if (width > probability_bits + 1 || s + run > byte_values)
            throw std::invalid_argument("a table of the exact values is broken");
        if (width > 0) {
            table[s] = static_cast<std::uint16_t>((1u << (width - 1)) + in.get(width - 1));
            sum += table[s];
        }
        s += run;
    }
    if (sum != 0 && sum != probability_whole)
        throw std::invalid_argument("a table of the exact values does not add up");
    return table;
}

// Fills the slots of one class: what each remainder of a state means. A class without symbols gets harmless slots.
void fill_slots(const Frequencies& table, Slot* slots) {
    std::uint32_t start = 0;
    for (std::uint32_t s = 0; s < byte_values; ++s) {
        const std::uint32_t frequency = table[s];
        for (std::uint32_t i = 0; i < frequency; ++i) slots[start + i] = slot_of(s, frequency, i);
        start += frequency;
    }
    if (start == 0) std::fill_n(slots, probability_whole, slot_of(0, 1, 0));
}

}  // namespace

Frequencies frequencies_of(const Counts& counts) {
    const auto total = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
    Frequencies table{};
    if (total == 0) return table;
    std::int64_t left = probability_whole;
    for (std::size_t s = 0; s < byte_values; ++s) {
        if (counts[s] == 0) continue;
        const std::uint64_t rounded = (counts[s] * std::uint64_t{probability_whole} + total / 2) / total;
        table[s] = static_cast<std::uint16_t>(std::max<std::uint64_t>(rounded, 1));
        left -= table[s];
    }
    // Rounding may leave the sum too small or too large. The most frequent byte takes the difference: there it costs
    // least.
    while (left != 0) {
        auto& largest = *std::max_element(table.begin(), table.end());
        const std::int64_t change = left > 0 ? left : std::max<std::int64_t>(left, -(largest / 8 + 1));
        largest = static_cast<std::uint16_t>(largest + change);
        left -= change;
    }
    return table;
}

double information(const Counts& counts) {
    double total = 0, bits = 0;
    for (const auto count : counts) {
        if (count == 0) continue;
        total += count;
        bits -= count * std::log2(count);
    }
    return total > 0 ? (bits + total * std::log2(total)) / 8 : 0;
}

std::size_t coded_size(const Counts& counts) {
    const auto occurring = byte_values - static_cast<std::size_t>(std::count(counts.begin(), counts.end(), 0));
    return static_cast<std::size_t>(information(counts)) + occurring * 10 / 8 + 8;
}

void classify_by_previous(Bytes symbols, std::uint8_t top, std::uint8_t* classes) {
    const std::size_t first = std::min(symbols.size(), rans_states);
    std::fill_n(classes, first, std::uint8_t{0});
    for (std::size_t i = first; i < symbols.size(); ++i) classes[i] = class_of(top, symbols[i - rans_states]);
}

void encode_plane(Bytes symbols, Bytes classes, std::span<const Frequencies> tables, RansScratch& scratch,
                  std::vector<std::uint8_t>& out) {
    BitWriter head;
    for (const auto& table : tables) put_table(head, table);
    const auto bytes = head.finish();
    out.insert(out.end(), bytes.begin(), bytes.end());

    if (scratch.words.size() < room_for_words(symbols.size())) scratch.words.resize(room_for_words(symbols.size()));
    std::uint16_t* const end = scratch.words.data() + scratch.words.size();
    States states;
    states.fill(lowest_state);
    const auto steps = encoder_steps(tables);
    const std::uint16_t* const begin =
        encode_symbols(states, steps.data(), classes.empty() ? nullptr : classes.data(), symbols, end);
    const std::size_t words_size = static_cast<std::size_t>(end - begin) * sizeof(std::uint16_t);
    const std::size_t place = out.size();
    out.resize(place + sizeof states + words_size);
    std::memcpy(out.data() + place, states.data(), sizeof states);
    std::memcpy(out.data() + place + sizeof states, begin, words_size);
}

void decode_plane(Bytes& in, const Classes& classes, RansScratch& scratch, std::span<std::uint8_t> symbols) {
    auto& slots = scratch.slots;
    slots.resize(class_count * probability_whole);
    BitReader head(in);
    const std::size_t tables = classes.kind == Classes::one ? 1 : class_count;
    for (std::size_t c = 0; c < tables; ++c) fill_slots(get_table(head), slots.data() + c * probability_whole);
    in = in.subspan(head.align());

    States states;
    if (in.size() < sizeof states) throw std::invalid_argument("the exact values end too early");
    std::memcpy(states.data(), in.data(), sizeof states);
    for (const auto state : states)
        if (state < lowest_state || state >> 31 != 0)
            throw std::invalid_argument("the exact values begin with a state that no encoder leaves");
    Words words{in.data() + sizeof states, in.data() + in.size()};
    decode_symbols(states, words, slots.data(), classes, symbols);
    in = {words.next, words.end};
    for (const auto state : states)
        if (state != lowest_state) throw std::invalid_argument("the exact values do not end where they began");
}

}  // namespace dynaquant::plane_rans
