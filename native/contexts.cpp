// The contexts of levels.
#include "contexts.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

namespace dynaquant::level_rans {
namespace {

// A group costs as much time as coding some hundred levels. So of n levels, contexts with less than n divided by
// (32 + n / 256) of them begin as one group with their neighbours. That makes some streams up to 0.4 % larger.
constexpr std::uint64_t least_groups = 32, levels_of_group = 256;

// Returns the contexts that groups begin with, before any are merged.
std::vector<std::size_t> begins_of_first_groups(std::span<const Counts> counts) {
    std::vector<std::uint64_t> sizes;
    for (const Counts& each : counts)
        sizes.push_back(std::accumulate(each.begin(), each.end(), std::uint64_t{0}));
    const auto total = std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0});
    const std::uint64_t most = least_groups + total / levels_of_group;
    const std::uint64_t share = most < counts.size() ? total / most : 0;
    std::vector<std::size_t> begins{0};
    std::uint64_t size = sizes[0];
    for (std::size_t c = 1; c < counts.size(); ++c) {
        if (sizes[c] == 0) continue;
        if (size >= share || sizes[c] >= share) {
            begins.push_back(c);
            size = 0;
        }
        size += sizes[c];
    }
    return begins;
}

void add(Counts& sum, const Counts& counts) {
    std::transform(sum.begin(), sum.end(), counts.begin(), sum.begin(), std::plus<>());
}

Counts sum_of(std::span<const Counts> counts) {
    Counts sum{};
    for (const Counts& each : counts) add(sum, each);
    return sum;
}

Group merged(const Group& a, const Group& b) {
    Counts sum = a.counts;
    add(sum, b.counts);
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
    if (levels.size() < size) {
        const std::lock_guard lock(mutex_);
        for (std::size_t i = 0; i < levels.size(); ++i) ++counts_[(parent ? parent[i] * columns_ : 0) + levels[i]];
        return;
    }
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
std::vector<Group> grouped(std::span<const Counts> counts) {
    struct Remaining {
        std::size_t group, joined;  // indices: of the group, and of it and the next one as one
        double saves;               // by joining them
    };
    std::vector<Group> groups;  // large, so they stay where they are
    std::vector<Remaining> remaining;
    const std::vector<std::size_t> begins = begins_of_first_groups(counts);
    groups.reserve(2 * begins.size());
    for (std::size_t g = 0; g < begins.size(); ++g) {
        const std::size_t end = g + 1 < begins.size() ? begins[g + 1] : counts.size();
        const Group group(begins[g], sum_of(counts.subspan(begins[g], end - begins[g])));
        groups.insert(groups.end(), 2, group);
        remaining.push_back({2 * g, 2 * g + 1, 0.0});
    }
    const auto join = [&](std::vector<Remaining>::iterator at) {
        at->saves = -std::numeric_limits<double>::infinity();
        if (at + 1 == remaining.end()) return;
        const Group &a = groups[at->group], &b = groups[(at + 1)->group];
        groups[at->joined] = merged(a, b);
        at->saves = a.bits + b.bits - groups[at->joined].bits;
    };
    for (auto at = remaining.begin(); at != remaining.end(); ++at) join(at);
    while (remaining.size() > 1) {
        const auto best = std::max_element(remaining.begin(), remaining.end(),
                                           [](const Remaining& a, const Remaining& b) { return a.saves < b.saves; });
        if (best->saves < 0) break;
        std::swap(best->group, best->joined);
        remaining.erase(best + 1);
        join(best);
        if (best != remaining.begin()) join(best - 1);
    }
    std::vector<Group> found;
    for (const Remaining& each : remaining) found.push_back(groups[each.group]);
    return found;
}

}  // namespace dynaquant::level_rans
