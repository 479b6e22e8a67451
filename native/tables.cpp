// Passes over values with tables of 65,536 entries, indexed by the top 16 bits of a float.
#include "tables.hpp"

#include <algorithm>
#include <array>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "parallel.hpp"

namespace dynaquant {
namespace {

// Values per piece of parallel work.
constexpr std::size_t block_size = std::size_t{1} << 20;
constexpr std::size_t small_block = std::size_t{1} << 16;  // fits into the cache, for two passes

template <class Bits>
constexpr unsigned bucket_shift = 8 * sizeof(Bits) - 16;

template <class T>
std::span<T> block_of(std::span<T> values, std::size_t block, std::size_t size = block_size) {
    const std::size_t begin = block * size;
    return values.subspan(begin, std::min(size, values.size() - begin));
}

}  // namespace

std::uint8_t highest_of(std::span<const std::uint8_t> levels) {
    std::uint8_t highest = 0;  // compilers vectorise this loop, unlike std::max_element
    for (const auto level : levels) highest = std::max(highest, level);
    return highest;
}

template <class Bits>
void log_histogram(std::span<const Bits> values, std::span<std::int64_t, bucket_count> counts) {
    // Clearing and adding up the tables below takes as long as counting a few hundred thousand values.
    if (values.size() < block_size / 4) {
        for (const auto value : values) ++counts[value >> bucket_shift<Bits>];
        return;
    }
    std::mutex mutex;
    parallel_for(block_count(values.size(), block_size), [&](std::size_t b) {
        // Neighbouring weights often share a bucket, and an increment waits for the previous one at the same address.
        // Four tables in turn avoid that.
        constexpr std::size_t ways = 4;
        std::vector<std::uint32_t> partial(ways * bucket_count);
        const auto block = block_of(values, b);
        const std::size_t whole = block.size() / ways * ways;
        for (std::size_t i = 0; i < whole; i += ways)
            for (std::size_t w = 0; w < ways; ++w)
                ++partial[w * bucket_count + (block[i + w] >> bucket_shift<Bits>)];
        for (std::size_t i = whole; i < block.size(); ++i) ++partial[block[i] >> bucket_shift<Bits>];
        const std::lock_guard lock(mutex);
        for (std::size_t w = 0; w < ways; ++w)
            for (std::size_t k = 0; k < bucket_count; ++k) counts[k] += partial[w * bucket_count + k];
    });
}

template <class Bits>
void assign_levels(std::span<const Bits> values, std::span<const std::uint8_t, bucket_count> table,
                   std::span<const std::uint32_t> sensitivity,
                   std::span<const std::uint8_t, bucket_count> sensitivity_table, std::span<std::uint8_t> levels) {
    parallel_for(block_count(values.size(), block_size), [&](std::size_t b) {
        const auto block = block_of(values, b);
        const auto out = block_of(levels, b);
        if (sensitivity.empty()) {
            for (std::size_t i = 0; i < block.size(); ++i) out[i] = table[block[i] >> bucket_shift<Bits>];
            return;
        }
        const auto other = block_of(sensitivity, b);
        for (std::size_t i = 0; i < block.size(); ++i) {
            const std::uint8_t own = table[block[i] >> bucket_shift<Bits>];
            const std::uint8_t say = sensitivity_table[other[i] >> 16];
            out[i] = say == undecided || own == level_protected ? own : say;
        }
    });
}

template <class Bits>
void values_of_levels(std::span<const std::uint8_t> levels, std::span<const Bits> table,
                      std::span<const std::uint16_t> protected_values, std::span<Bits> out) {
    const std::size_t blocks = block_count(levels.size(), small_block);
    std::vector<std::size_t> first(blocks + 1);
    const auto checked = [&](std::size_t b) {
        const auto block = block_of(levels, b, small_block);
        if (!block.empty() && highest_of(block) >= table.size())
            throw std::invalid_argument("a level lies outside the codebook");
        first[b + 1] = static_cast<std::size_t>(std::count(block.begin(), block.end(), level_protected));
        return block;
    };
    std::array<Bits, 256> full{};  // has a value for every byte, so look-ups need no check
    std::copy_n(table.begin(), std::min(table.size(), full.size()), full.begin());
    // Protected levels take the next of the protected values, so a block depends on those before it: rare, and slower.
    if (protected_values.empty()) {
        parallel_for(blocks, [&](std::size_t b) {
            const auto block = checked(b);
            std::transform(block.begin(), block.end(), block_of(out, b, small_block).begin(),
                           [&](std::uint8_t level) { return full[level]; });
        });
    } else {
        parallel_for(blocks, checked);
    }
    std::partial_sum(first.begin(), first.end(), first.begin());
    if (first[blocks] != protected_values.size())
        throw std::invalid_argument("the number of protected values differs from the number of protected levels");
    if (protected_values.empty()) return;
    parallel_for(blocks, [&](std::size_t b) {
        std::size_t next = first[b];
        const auto value_of = [&](std::uint8_t level) {
            if (level != level_protected) return full[level];
            return static_cast<Bits>(static_cast<Bits>(protected_values[next++]) << bucket_shift<Bits>);
        };
        const auto block = block_of(levels, b, small_block);
        std::transform(block.begin(), block.end(), block_of(out, b, small_block).begin(), value_of);
    });
}

#define DYNAQUANT_INSTANTIATE(Bits)                                                                                  \
    template void log_histogram<Bits>(std::span<const Bits>, std::span<std::int64_t, bucket_count>);                 \
    template void assign_levels<Bits>(std::span<const Bits>, std::span<const std::uint8_t, bucket_count>,            \
                                      std::span<const std::uint32_t>, std::span<const std::uint8_t, bucket_count>,   \
                                      std::span<std::uint8_t>);                                                      \
    template void values_of_levels<Bits>(std::span<const std::uint8_t>, std::span<const Bits>,                       \
                                         std::span<const std::uint16_t>, std::span<Bits>);
DYNAQUANT_INSTANTIATE(std::uint32_t)
DYNAQUANT_INSTANTIATE(std::uint16_t)
#undef DYNAQUANT_INSTANTIATE

}  // namespace dynaquant
