// Levels to bytes and back: entropy coding conditioned on the parent's levels.
#include "conditional.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <list>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "bits.hpp"
#include "contexts.hpp"
#include "frequencies.hpp"
#include "level_rans.hpp"
#include "little_endian.hpp"
#include "parallel.hpp"
#include "tables.hpp"

namespace dynaquant {
namespace {

using namespace level_rans;

using Bytes = std::span<const std::uint8_t>;

constexpr std::size_t wide_block = std::size_t{1} << 20;
constexpr std::size_t many_values = 8192;

// Layouts of a stream (docs/format.md). The highest byte of the first block's size says which it is. The wide layout
// takes no more bytes: it has fewer sizes, and not more states in all.
enum Layout : std::size_t { narrow = 0, wide = 1 };
constexpr unsigned layout_shift = 24;

// How levels are cut into blocks. A state takes bytes, which matters in a small block. Many states make coding fast.
class Blocks {
public:
    Blocks(std::size_t values, Layout layout) : values_(values), layout_(layout) {}

    std::size_t count() const {
        return layout_ == narrow ? block_count(values_, size()) : std::max<std::size_t>(1, values_ / size());
    }
    std::size_t begin(std::size_t block) const { return block * size(); }
    // The last narrow block may be shorter than the others. The last wide one may be longer.
    std::size_t length(std::size_t block) const {
        return block + 1 < count() ? size() : values_ - begin(block);
    }
    unsigned states(std::size_t block) const {
        if (layout_ == narrow) return length(block) < many_values ? 1 : 4;
        return values_ > 6 * conditional_block ? 32 : values_ > 3 * conditional_block ? 16 : 8;
    }

private:
    std::size_t size() const { return layout_ == narrow ? conditional_block : wide_block; }

    std::size_t values_;
    Layout layout_;
};

void check_shape(std::size_t levels, std::size_t parent, ContextTable context_of, std::size_t contexts) {
    if (parent != 0 && parent != levels) throw std::invalid_argument("the parent has another number of levels");
    if (contexts < 1 || contexts > 256) throw std::invalid_argument("there must be 1 to 256 contexts");
    for (const auto context : context_of)
        if (context >= contexts) throw std::invalid_argument("a context is not below the number of contexts");
}

// Whether at most one symbol occurs. Then coding a value does not change the state.
bool is_certain(const Frequencies& frequencies) {
    return std::count_if(frequencies.begin(), frequencies.end(), [](std::uint32_t f) { return f > 0; }) <= 1;
}

double bits_of(const std::vector<Group>& groups) {
    double bits = 0.0;
    for (const Group& group : groups) bits += group.bits;
    return bits;
}

// Returns the bits of levels without their parent, but for the order of symbols in their table.
double bits_alone(const PairCounts& pairs, std::size_t rows, std::size_t columns) {
    Counts counts{};
    for (std::size_t source = 0; source < rows; ++source)
        for (std::size_t level = 0; level < columns; ++level) counts[level] += pairs.of(source, level);
    return Group(0, counts).bits;
}

Layout layout_of(Bytes stream, std::size_t values) {
    if (values == 0) return narrow;
    const std::size_t layout = get_u32(stream) >> layout_shift;
    if (layout > wide || (layout == wide && values <= conditional_block))
        throw std::invalid_argument("the coded levels have an unknown layout");
    return static_cast<Layout>(layout);
}

}  // namespace

std::optional<std::vector<std::uint8_t>> encode_conditional(Bytes levels, Bytes parent, LevelTable symbol_of,
                                                            ContextTable context_of, std::size_t contexts,
                                                            std::optional<double> least_gain) {
    check_shape(levels.size(), parent.size(), context_of, contexts);
    const Layout layout = levels.size() > conditional_block ? wide : narrow;
    const Blocks blocks(levels.size(), layout);
    const auto parent_of = [&](std::size_t begin) { return parent.empty() ? nullptr : parent.data() + begin; };
    const std::size_t rows = std::size_t{highest_of(parent)} + 1, columns = std::size_t{highest_of(levels)} + 1;

    PairCounts pairs(rows, columns);
    parallel_for(blocks.count(), [&](std::size_t b) {
        pairs.add(levels.subspan(blocks.begin(b), blocks.length(b)), parent_of(blocks.begin(b)));
    });
    const auto counts = cleared<Counts>(contexts);  // of every symbol in every context
    for (std::size_t source = 0; source < rows; ++source)
        for (std::size_t level = 0; level < columns; ++level)
            if (const auto count = pairs.of(source, level); count > 0)
                counts[context_of[source]][symbol_of[source << 8 | level]] += count;

    const std::vector<Group> groups = grouped(counts);
    if (least_gain && !parent.empty() && bits_of(groups) > (1.0 - *least_gain) * bits_alone(pairs, rows, columns))
        return std::nullopt;
    BitWriter tables;
    std::vector<EncoderStep> steps(groups.size() << 8);  // at group << 8 | symbol
    std::vector<std::size_t> group_of(contexts);
    tables.put(static_cast<std::uint32_t>(groups.size() - 1), 8);
    for (std::size_t g = 0; g < groups.size(); ++g) {
        const std::size_t end = g + 1 < groups.size() ? groups[g + 1].begin : contexts;
        if (g > 0) tables.put(static_cast<std::uint32_t>(groups[g].begin), 8);
        for (std::size_t c = groups[g].begin; c < end; ++c) group_of[c] = g << 8;
        if (levels.empty()) continue;
        put_frequencies(tables, groups[g].frequencies);
        std::uint32_t before = 0;
        for (std::size_t s = 0; s < 256; ++s)
            if (const auto frequency = groups[g].frequencies[s]; frequency > 0) {
                steps[g << 8 | s] = step_of(before, frequency);
                before += frequency;
            }
    }
    const bool certain =
        std::all_of(groups.begin(), groups.end(), [](const Group& group) { return is_certain(group.frequencies); });
    const auto steps_of_pairs = cleared<EncoderStep>(certain ? 0 : rows * columns);
    for (std::size_t source = 0; source < rows && !certain; ++source)
        for (std::size_t level = 0; level < columns; ++level)
            if (pairs.of(source, level) > 0)
                steps_of_pairs[source * columns + level] =
                    steps[group_of[context_of[source]] | symbol_of[source << 8 | level]];

    const EncoderTable table{columns, steps_of_pairs};
    std::vector<std::vector<std::uint8_t>> coded(blocks.count());
    parallel_for(blocks.count(), [&](std::size_t b) {
        const Bytes uncertain = certain ? Bytes{} : levels.subspan(blocks.begin(b), blocks.length(b));
        encode_block(uncertain, parent_of(blocks.begin(b)), table, blocks.states(b), coded[b]);
    });

    const auto table_bytes = tables.finish();
    std::size_t size = 4 * coded.size() + table_bytes.size();
    for (const auto& block : coded) size += block.size();
    std::vector<std::uint8_t> stream;
    stream.reserve(size);
    for (std::size_t b = 0; b < coded.size(); ++b)
        put_u32(stream, coded[b].size() | (b == 0 ? layout << layout_shift : 0));
    stream.insert(stream.end(), table_bytes.begin(), table_bytes.end());
    for (const auto& block : coded) stream.insert(stream.end(), block.begin(), block.end());
    return stream;
}

void decode_conditional(Bytes stream, Bytes parent, LevelTable level_of, ContextTable context_of, std::size_t contexts,
                        std::size_t symbols, std::span<std::uint8_t> levels) {
    check_shape(levels.size(), parent.size(), context_of, contexts);
    if (symbols > 256) throw std::invalid_argument("there must be at most 256 symbols");
    const Layout layout = layout_of(stream, levels.size());
    const Blocks blocks(levels.size(), layout);
    if (stream.size() / 4 < blocks.count()) throw std::invalid_argument("the coded levels end too early");
    std::vector<std::size_t> sizes(blocks.count());
    std::size_t total = 0;
    for (std::size_t b = 0; b < sizes.size(); ++b)
        total += sizes[b] = get_u32(stream) - (b == 0 ? layout << layout_shift : 0);
    if (total > stream.size()) throw std::invalid_argument("the coded levels end too early");

    BitReader tables(stream.first(stream.size() - total));
    const std::size_t groups = tables.get(8) + 1;
    if (groups > contexts) throw std::invalid_argument("there are more groups than contexts");
    DecoderTable table;
    table.slots.resize(groups * frequency_total);
    std::vector<std::array<std::uint16_t, near_symbols>> ends(groups);
    std::vector<std::uint8_t> group_of(contexts);
    bool certain = true;
    std::size_t previous = 0;
    for (std::size_t g = 0; g < groups; ++g) {
        const std::size_t begin = g > 0 ? tables.get(8) : 0;
        if (begin >= contexts || (g > 0 && begin <= previous))
            throw std::invalid_argument("the groups of contexts are not in order");
        for (std::size_t c = begin; c < contexts; ++c) group_of[c] = static_cast<std::uint8_t>(g);
        previous = begin;
        if (levels.empty()) continue;
        const Frequencies frequencies = get_frequencies(tables, symbols);
        certain = certain && is_certain(frequencies);
        std::uint32_t end = 0;
        for (std::size_t s = 0; s < near_symbols; ++s)
            ends[g][s] = static_cast<std::uint16_t>(end += s < frequencies.size() ? frequencies[s] : 0);
        Slot* slot = table.slots.data() + g * frequency_total;
        for (std::uint32_t s = 0; s < frequencies.size(); ++s)
            for (std::uint32_t offset = 0; offset < frequencies[s]; ++offset)
                *slot++ = slot_of(parent.empty() ? level_of[s] : s, frequencies[s], offset);
    }
    tables.expect_end();
    for (std::size_t source = 0; source < parent_levels; ++source) {
        table.group[source] = group_of[context_of[source]];
        for (std::size_t s = 0; s < near_symbols; ++s) {
            table.near[s][source] = level_of[source << 8 | s];
            table.ends[s][source] = ends[table.group[source]][s];
        }
    }
    std::array<std::uint8_t, 256> only;  // the only level after each parent level, if all tables are certain
    for (std::size_t source = 0; source < parent_levels; ++source) {
        const std::uint32_t symbol = levels.empty() ? 0 : *table.slots_of(static_cast<std::uint8_t>(source)) >> 24;
        only[source] = parent.empty() ? static_cast<std::uint8_t>(symbol) : level_of[source << 8 | symbol];
    }
    table.level_of = level_of.data();
    std::vector<std::uint8_t> longer;
    if (layout == wide && !parent.empty() && !certain) {  // vectors read four bytes where they need one
        longer.resize(level_of.size() + 3);
        std::copy(level_of.begin(), level_of.end(), longer.begin());
        table.level_of = longer.data();
    }

    std::vector<Bytes> coded;
    stream = stream.last(total);
    for (const auto size : sizes) coded.push_back(get_bytes(stream, size));
    parallel_for(blocks.count(), [&](std::size_t b) {
        const std::size_t length = blocks.length(b);
        const std::uint8_t* const sources = parent.empty() ? nullptr : parent.data() + blocks.begin(b);
        const auto block = levels.subspan(blocks.begin(b), length);
        if (!certain) return decode_block(coded[b], sources, table, blocks.states(b), block);
        decode_block(coded[b], sources, table, blocks.states(b), {});
        if (sources == nullptr)
            std::fill(block.begin(), block.end(), only[0]);
        else if (is_uniform(sources, length))
            std::fill(block.begin(), block.end(), only[*sources]);
        else
            std::transform(sources, sources + length, block.begin(), [&](std::uint8_t source) { return only[source]; });
    });
}

}  // namespace dynaquant
