// The contexts of levels.
#include "contexts.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <list>

namespace dynaquant::level_rans {
namespace {

Group merged(const Group& a, const Group& b) {
    Counts sum;
    std::transform(a.counts.begin(), a.counts.end(), b.counts.begin(), sum.begin(), std::plus<>());
    return {a.begin, sum};
}

}  // namespace

Group::Group(std::size_t from, const Counts& of) : begin(from), counts(of), frequencies(scaled(of)) {
    bits = bits_of(counts, frequencies);
}

bool is_uniform(const std::uint8_t* levels, std::size_t count) {
    return levels == nullptr || count < 2 || std::memcmp(levels, levels + 1, count - 1) == 0;
}

// An increment waits for the previous one at the same address. Several tables in turn avoid that, if they pay.
void PairCounts::add(std::span<const std::uint8_t> levels, const std::uint8_t* parent) {
    if (is_uniform(levels.data(), levels.size()) && is_uniform(parent, levels.size())) {
        const std::lock_guard lock(mutex_);
        counts_[(parent ? *parent * columns_ : 0) + levels.front()] += levels.size();
        return;
    }
    const std::size_t size = counts_.size(), ways = levels.size() >= 8 * size ? 4 : 1;
    std::vector<std::uint32_t> found(ways * size);
    std::array<std::uint16_t, 4096> pairs;
    for (std::size_t begin = 0; begin < levels.size(); begin += pairs.size()) {
        const std::size_t count = std::min(pairs.size(), levels.size() - begin);
        const std::uint8_t* const from = levels.data() + begin;
        if (parent == nullptr)
            for (std::size_t i = 0; i < count; ++i) pairs[i] = from[i];
        else
            for (std::size_t i = 0; i < count; ++i)
                pairs[i] = static_cast<std::uint16_t>(parent[begin + i] * columns_ + from[i]);
        std::size_t i = 0;
        if (ways == 4)
            for (; i + 4 <= count; i += 4)
                for (std::size_t way = 0; way < 4; ++way) ++found[way * size + pairs[i + way]];
        for (; i < count; ++i) ++found[pairs[i]];
    }
    const std::lock_guard lock(mutex_);
    for (std::size_t way = 0; way < ways; ++way)
        for (std::size_t pair = 0; pair < size; ++pair) counts_[pair] += found[way * size + pair];
}

// The pair that saves most is merged first.
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

}  // namespace dynaquant::level_rans
