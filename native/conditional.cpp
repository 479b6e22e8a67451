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
#include "frequencies.hpp"
#include "level_rans.hpp"
#include "little_endian.hpp"
#include "parallel.hpp"
#include "tables.hpp"

namespace dynaquant {
namespace {

using namespace level_rans;

using Bytes = std::span<const std::uint8_t>;

// A state takes bytes, which matters in a small block. Several states make decoding a large block faster.
constexpr unsigned many_states = 4;
constexpr std::size_t many_values = 8192;

struct Range {
    std::size_t begin, length;
};

Range block_range(std::size_t values, std::size_t block) {
    const std::size_t begin = block * conditional_block;
    return {begin, std::min(conditional_block, values - begin)};
}

void check_shape(std::size_t levels, std::size_t parent, ContextTable context_of, std::size_t contexts) {
    if (parent != 0 && parent != levels) throw std::invalid_argument("the parent has another number of levels");
    if (contexts < 1 || contexts > 256) throw std::invalid_argument("there must be 1 to 256 contexts");
    for (const auto context : context_of)
        if (context >= contexts) throw std::invalid_argument("a context is not below the number of contexts");
}

// Contexts that share one frequency table: from `begin` to the beginning of the next group.
struct Group {
    std::size_t begin;
    Counts counts;
    Frequencies frequencies;
    double bits;

    Group(std::size_t from, const Counts& of) : begin(from), counts(of), frequencies(scaled(of)) {
        bits = bits_of(counts, frequencies);
    }
};

Group merged(const Group& a, const Group& b) {
    Counts sum;
    std::transform(a.counts.begin(), a.counts.end(), b.counts.begin(), sum.begin(), std::plus<>());
    return {a.begin, sum};
}

// Merges neighbouring contexts as long as that saves bits. The pair that saves most is merged first.
std::vector<Group> grouped(const std::vector<Counts>& counts) {
    struct Pair {
        Group group, merged;  // merged: with the next group; unused in the last pair
        double saves;
    };
    std::list<Pair> pairs;
    const auto set_saving = [&](std::list<Pair>::iterator pair) {
        if (const auto next = std::next(pair); next != pairs.end()) {
            pair->merged = merged(pair->group, next->group);
            pair->saves = pair->group.bits + next->group.bits - pair->merged.bits;
        } else {
            pair->saves = -std::numeric_limits<double>::infinity();
        }
    };
    for (std::size_t c = 0; c < counts.size(); ++c) {
        const bool occurs = std::any_of(counts[c].begin(), counts[c].end(), [](std::uint64_t n) { return n > 0; });
        if (!occurs && c > 0) continue;
        const Group group(c, counts[c]);
        pairs.push_back({group, group, 0.0});
    }
    for (auto pair = pairs.begin(); pair != pairs.end(); ++pair) set_saving(pair);
    while (pairs.size() > 1) {
        const auto best = std::max_element(pairs.begin(), pairs.end(),
                                           [](const Pair& a, const Pair& b) { return a.saves < b.saves; });
        if (best->saves < 0) break;
        best->group = best->merged;
        pairs.erase(std::next(best));
        set_saving(best);
        if (best != pairs.begin()) set_saving(std::prev(best));
    }
    std::vector<Group> groups;
    for (const Pair& pair : pairs) groups.push_back(pair.group);
    return groups;
}

// Whether at most one symbol occurs. Then coding a value does not change the state.
bool is_certain(const Frequencies& frequencies) {
    return std::count_if(frequencies.begin(), frequencies.end(), [](std::uint32_t f) { return f > 0; }) <= 1;
}

// Whether all levels are the same, for example because a moment was dropped.
bool is_uniform(const std::uint8_t* levels, std::size_t count) {
    return levels == nullptr || count < 2 || std::memcmp(levels, levels + 1, count - 1) == 0;
}

// An increment waits for the previous one at the same address. Several tables in turn avoid that. A table for pairs is
// large, so there are fewer of them.
std::size_t table_count(std::size_t length, bool has_parent) { return length < many_values ? 1 : has_parent ? 2 : 8; }

// Counts the pairs of levels at index parent level << 8 | level. counts: `ways` tables, added up by the caller; each
// has a row for each parent level up to the highest one.
void count_pairs(Bytes levels, const std::uint8_t* parent, std::span<std::uint32_t> counts, std::size_t ways) {
    if (is_uniform(levels.data(), levels.size()) && is_uniform(parent, levels.size())) {
        counts[(parent ? std::size_t{*parent} : 0) << 8 | levels.front()] = static_cast<std::uint32_t>(levels.size());
        return;
    }
    const std::size_t size = counts.size() / ways;
    std::size_t i = 0;
    if (parent == nullptr && ways == 8) {
        for (; i + 8 <= levels.size(); i += 8) {
            std::uint64_t eight;  // one read is faster than eight
            std::memcpy(&eight, levels.data() + i, sizeof eight);
            for (std::size_t way = 0; way < 8; ++way) ++counts[way * 256 + (eight >> (8 * way) & 0xFF)];
        }
    }
    for (; i < levels.size(); ++i) {
        const std::size_t source = parent ? parent[i] : 0;
        ++counts[(ways == 1 ? 0 : i & 1) * size + (source << 8 | levels[i])];
    }
}

// share_of: the index into shares for every pair parent level << 8 | level.
template <unsigned States>
void encode_block(Bytes levels, const std::uint8_t* parent, const std::uint16_t* share_of, const Share* shares,
                  std::vector<std::uint8_t>& out) {
    static thread_local std::vector<std::uint16_t> room(conditional_block);
    RansEncoder<States> coder({room.data(), levels.size()});
    const auto put = [&](std::size_t i, unsigned state) {
        const std::size_t source = parent ? parent[i] : 0;
        coder.put(state, shares[share_of[source << 8 | levels[i]]]);
    };
    std::size_t i = levels.size();
    while (i % States != 0) --i, put(i, i % States);
    for (; i > 0; i -= States)
        for (unsigned state = States; state-- > 0;) put(i - States + state, state);
    coder.finish(out);
}

template <unsigned States>
void decode_block(Bytes stream, const std::uint8_t* parent, LevelTable level_of, const Slot* const* tables,
                  std::span<std::uint8_t> levels) {
    RansDecoder<States> coder(stream);
    const auto source_of = [&](std::size_t i) -> std::size_t { return parent ? parent[i] : 0; };
    std::size_t i = 0;
    auto quick = coder;  // a local copy: the compiler knows that writing levels cannot change it
    const auto decode = [&](std::size_t j, unsigned state) {
        const std::size_t source = source_of(j);
        levels[j] = level_of[source << 8 | quick.get_unchecked(state, tables[source])];
    };
    for (; i + States <= levels.size() && quick.has(States); i += States)
        [&]<unsigned... State>(std::integer_sequence<unsigned, State...>) {
            (decode(i + State, State), ...);
        }(std::make_integer_sequence<unsigned, States>());
    coder = quick;
    for (; i < levels.size(); ++i) {
        const std::size_t source = source_of(i);
        levels[i] = level_of[source << 8 | coder.get(i % States, tables[source])];
    }
    coder.expect_end();
}

}  // namespace

std::vector<std::uint8_t> encode_conditional(Bytes levels, Bytes parent, LevelTable symbol_of, ContextTable context_of,
                                             std::size_t contexts) {
    check_shape(levels.size(), parent.size(), context_of, contexts);
    const std::size_t blocks = block_count(levels.size(), conditional_block);
    const auto parent_of = [&](std::size_t begin) { return parent.empty() ? nullptr : parent.data() + begin; };

    const std::size_t rows = std::size_t{highest_of(parent)} + 1, columns = std::size_t{highest_of(levels)} + 1;

    // Count every symbol in every context.
    std::vector<Counts> counts(contexts);
    std::mutex counts_mutex;
    parallel_for(blocks, [&](std::size_t b) {
        const auto [begin, length] = block_range(levels.size(), b);
        const std::size_t ways = table_count(length, !parent.empty());
        std::vector<std::uint32_t> found(ways * rows * 256);  // 32 bits are enough for a block
        count_pairs(levels.subspan(begin, length), parent_of(begin), found, ways);
        const std::lock_guard lock(counts_mutex);
        for (std::size_t row = 0; row < ways * rows; ++row) {
            const std::size_t source = row % rows << 8;
            for (std::size_t level = 0; level < columns; ++level)
                if (const std::uint32_t count = found[row << 8 | level]; count > 0)
                    counts[context_of[source >> 8]][symbol_of[source | level]] += count;
        }
    });

    const std::vector<Group> groups = grouped(counts);
    BitWriter tables;
    std::vector<Share> shares(groups.size() * 256);
    std::vector<std::uint16_t> group_of(contexts);
    tables.put(static_cast<std::uint32_t>(groups.size() - 1), 8);
    for (std::size_t g = 0; g < groups.size(); ++g) {
        const std::size_t end = g + 1 < groups.size() ? groups[g + 1].begin : contexts;
        if (g > 0) tables.put(static_cast<std::uint32_t>(groups[g].begin), 8);
        for (std::size_t c = groups[g].begin; c < end; ++c) group_of[c] = static_cast<std::uint16_t>(g << 8);
        if (levels.empty()) continue;
        put_frequencies(tables, groups[g].frequencies);
        std::uint32_t before = 0;
        for (std::size_t s = 0; s < 256; ++s)
            if (const auto frequency = groups[g].frequencies[s]; frequency > 0) {
                shares[g << 8 | s] = Share(frequency, before);
                before += frequency;
            }
    }
    const bool certain =
        std::all_of(groups.begin(), groups.end(), [](const Group& group) { return is_certain(group.frequencies); });
    std::vector<std::uint16_t> share_of(certain ? 0 : rows * 256);
    for (std::size_t pair = 0; pair < share_of.size(); ++pair)
        share_of[pair] = static_cast<std::uint16_t>(group_of[context_of[pair >> 8]] | symbol_of[pair]);

    std::vector<std::vector<std::uint8_t>> coded(blocks);
    parallel_for(blocks, [&](std::size_t b) {
        const auto [begin, length] = block_range(levels.size(), b);
        const auto encode = length < many_values ? encode_block<1> : encode_block<many_states>;
        const Bytes uncertain = certain ? Bytes{} : levels.subspan(begin, length);
        encode(uncertain, parent_of(begin), share_of.data(), shares.data(), coded[b]);
    });

    std::vector<std::uint8_t> stream;
    for (const auto& block : coded) put_u32(stream, block.size());
    const auto table_bytes = tables.finish();
    stream.insert(stream.end(), table_bytes.begin(), table_bytes.end());
    for (const auto& block : coded) stream.insert(stream.end(), block.begin(), block.end());
    return stream;
}

void decode_conditional(Bytes stream, Bytes parent, LevelTable level_of, ContextTable context_of, std::size_t contexts,
                        std::size_t symbols, std::span<std::uint8_t> levels) {
    check_shape(levels.size(), parent.size(), context_of, contexts);
    if (symbols > 256) throw std::invalid_argument("there must be at most 256 symbols");
    const std::size_t blocks = block_count(levels.size(), conditional_block);
    if (stream.size() / 4 < blocks) throw std::invalid_argument("the coded levels end too early");
    std::vector<std::size_t> sizes(blocks);
    std::size_t total = 0;
    for (auto& size : sizes) total += size = get_u32(stream);
    if (total > stream.size()) throw std::invalid_argument("the coded levels end too early");

    BitReader tables(stream.first(stream.size() - total));
    const std::size_t groups = tables.get(8) + 1;
    if (groups > contexts) throw std::invalid_argument("there are more groups than contexts");
    std::vector<Slot> slots(groups * frequency_total);
    std::vector<std::size_t> group_of(contexts);
    bool certain = true;
    std::size_t previous = 0;
    for (std::size_t g = 0; g < groups; ++g) {
        const std::size_t begin = g > 0 ? tables.get(8) : 0;
        if (begin >= contexts || (g > 0 && begin <= previous))
            throw std::invalid_argument("the groups of contexts are not in order");
        for (std::size_t c = begin; c < contexts; ++c) group_of[c] = g;
        previous = begin;
        if (levels.empty()) continue;
        const Frequencies frequencies = get_frequencies(tables, symbols);
        certain = certain && is_certain(frequencies);
        Slot* slot = slots.data() + g * frequency_total;
        for (std::uint32_t s = 0; s < frequencies.size(); ++s)
            for (std::uint32_t offset = 0; offset < frequencies[s]; ++offset)
                *slot++ = slot_of(s, frequencies[s], offset);
    }
    tables.expect_end();
    std::array<const Slot*, 256> table_of;
    for (std::size_t source = 0; source < 256; ++source)
        table_of[source] = slots.data() + group_of[context_of[source]] * frequency_total;

    std::array<std::uint8_t, 256> only;  // the only level after each parent level, if all tables are certain
    for (std::size_t source = 0; source < 256; ++source)
        only[source] = levels.empty() ? std::uint8_t{0} : level_of[source << 8 | table_of[source][0] >> 24];

    std::vector<Bytes> coded;
    stream = stream.last(total);
    for (const auto size : sizes) coded.push_back(get_bytes(stream, size));
    parallel_for(blocks, [&](std::size_t b) {
        const auto [begin, length] = block_range(levels.size(), b);
        const std::uint8_t* const sources = parent.empty() ? nullptr : parent.data() + begin;
        const auto block = levels.subspan(begin, length);
        const auto decode = length < many_values ? decode_block<1> : decode_block<many_states>;
        decode(coded[b], sources, level_of, table_of.data(), certain ? block.first(0) : block);
        if (!certain) return;
        if (sources == nullptr)
            std::fill(block.begin(), block.end(), only[0]);
        else if (is_uniform(sources, length))
            std::fill(block.begin(), block.end(), only[*sources]);
        else
            std::transform(sources, sources + length, block.begin(), [&](std::uint8_t source) { return only[source]; });
    });
}

}  // namespace dynaquant
