// Passes over values with tables of 65,536 entries, indexed by the top 16 bits of a float.
#include "tables.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "byte_table.hpp"
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

std::size_t count_of(std::span<const std::uint8_t> levels, std::uint8_t wanted) {
    std::size_t total = 0;
    for (std::size_t begin = 0; begin < levels.size(); begin += 255) {
        std::uint8_t count = 0;  // a byte, which is enough for 255 levels, makes the vectors of compilers long
        for (const auto level : levels.subspan(begin, std::min<std::size_t>(255, levels.size() - begin)))
            count = static_cast<std::uint8_t>(count + (level == wanted));
        total += count;
    }
    return total;
}

template <class Bits>
using ValueTable = std::array<Bits, 256>;

#ifdef DYNAQUANT_X86

// Looks up 64 values at a time, each byte of a value in a table of its own. Returns how many values it has set.
template <class Bits>
DYNAQUANT_AVX512 std::size_t look_up_avx512(std::span<const std::uint8_t> levels, const ValueTable<Bits>& values,
                                            Bits* out) {
    ByteTable tables[sizeof(Bits)];
    for (unsigned k = 0; k < sizeof(Bits); ++k) {
        std::array<std::uint8_t, 256> bytes;
        for (std::size_t level = 0; level < bytes.size(); ++level)
            bytes[level] = std::bit_cast<std::array<std::uint8_t, sizeof(Bits)>>(values[level])[k];
        tables[k] = byte_table(bytes);
    }
    // Unpacking interleaves within each quarter of a register. With the levels in this order, the values come out in
    // order.
    const __m512i order = sizeof(Bits) == 2 ? _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7)
                                            : _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    std::size_t i = 0;
    for (; i + 64 <= levels.size(); i += 64) {
        const __m512i loaded = _mm512_loadu_si512(levels.data() + i);
        const __m512i index = sizeof(Bits) == 2 ? _mm512_permutexvar_epi64(order, loaded)
                                                : _mm512_permutexvar_epi32(order, loaded);
        __m512i byte[sizeof(Bits)];
        for (unsigned k = 0; k < sizeof(Bits); ++k) byte[k] = look_up(tables[k], index);
        const __m512i low = _mm512_unpacklo_epi8(byte[0], byte[1]), high = _mm512_unpackhi_epi8(byte[0], byte[1]);
        if constexpr (sizeof(Bits) == 2) {
            _mm512_storeu_si512(out + i, low);
            _mm512_storeu_si512(out + i + 32, high);
        } else {
            const __m512i upper_low = _mm512_unpacklo_epi8(byte[2], byte[3]);
            const __m512i upper_high = _mm512_unpackhi_epi8(byte[2], byte[3]);
            _mm512_storeu_si512(out + i, _mm512_unpacklo_epi16(low, upper_low));
            _mm512_storeu_si512(out + i + 16, _mm512_unpackhi_epi16(low, upper_low));
            _mm512_storeu_si512(out + i + 32, _mm512_unpacklo_epi16(high, upper_high));
            _mm512_storeu_si512(out + i + 48, _mm512_unpackhi_epi16(high, upper_high));
        }
    }
    return i;
}

#endif

// Sets out[i] to values[levels[i]].
template <class Bits>
void look_up_values(std::span<const std::uint8_t> levels, const ValueTable<Bits>& values, std::span<Bits> out) {
    std::size_t done = 0;
#ifdef DYNAQUANT_X86
    if (has_avx512()) done = look_up_avx512<Bits>(levels, values, out.data());
#endif
    for (; done < levels.size(); ++done) out[done] = values[levels[done]];
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
void levels_in_turns(std::span<const Bits> values, std::span<const std::uint8_t, bucket_count> low,
                     std::span<const std::uint8_t, bucket_count> high, std::span<const std::uint8_t> goes_up,
                     std::span<const std::uint8_t> turns, std::span<std::uint8_t> levels) {
    if (turns.empty()) return;
    std::vector<std::size_t> differ, begins;  // where the tables differ; the first row of each stretch of equal turns
    for (std::size_t bucket = 0; bucket < bucket_count; ++bucket)
        if (low[bucket] != high[bucket]) differ.push_back(bucket);
    for (std::size_t row = 0; row < turns.size(); ++row)
        if (row == 0 || turns[row] != turns[row - 1]) begins.push_back(row);
    const std::size_t width = values.size() / turns.size();
    parallel_for(begins.size(), [&](std::size_t k) {
        const auto ups = goes_up.subspan(turns[begins[k]] * std::size_t{256}, 256);
        std::vector<std::uint8_t> table(low.begin(), low.end());
        for (const auto bucket : differ)
            if (ups[low[bucket]]) table[bucket] = high[bucket];
        const std::size_t begin = begins[k] * width;
        const std::size_t end = (k + 1 < begins.size() ? begins[k + 1] : turns.size()) * width;
        for (std::size_t i = begin; i < end; ++i) levels[i] = table[values[i] >> bucket_shift<Bits>];
    });
}

std::vector<std::int64_t> protected_places(std::span<const std::uint8_t> levels) {
    std::vector<std::int64_t> found;
    for (std::size_t begin = 0; begin < levels.size(); begin += small_block) {
        const auto block = levels.subspan(begin, std::min(small_block, levels.size() - begin));
        std::size_t at = 0;
        for (std::size_t left = count_of(block, level_protected); left > 0; --left, ++at) {
            const void* const next = std::memchr(block.data() + at, level_protected, block.size() - at);
            at = static_cast<std::size_t>(static_cast<const std::uint8_t*>(next) - block.data());
            found.push_back(static_cast<std::int64_t>(begin + at));
        }
    }
    return found;
}

void look_up(std::span<const std::uint8_t> levels, const std::array<float, 256>& table, std::span<float> out) {
    look_up_values<float>(levels, table, out);
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
        first[b + 1] = count_of(block, level_protected);
        return block;
    };
    ValueTable<Bits> full{};  // has a value for every byte, so look-ups need no check
    std::copy_n(table.begin(), std::min(table.size(), full.size()), full.begin());
    // Protected levels take the next of the protected values, so a block depends on those before it: rare, and slower.
    if (protected_values.empty()) {
        parallel_for(blocks, [&](std::size_t b) { look_up_values<Bits>(checked(b), full, block_of(out, b, small_block)); });
    } else {
        parallel_for(blocks, checked);
    }
    std::partial_sum(first.begin(), first.end(), first.begin());
    if (first[blocks] != protected_values.size())
        throw std::invalid_argument("the number of protected values differs from the number of protected levels");
    if (protected_values.empty()) return;
    parallel_for(blocks, [&](std::size_t b) {
        const auto block = block_of(levels, b, small_block);
        const auto values = block_of(out, b, small_block);
        look_up_values<Bits>(block, full, values);
        const std::uint8_t* from = block.data();
        for (std::size_t next = first[b]; next < first[b + 1]; ++next, ++from) {
            const auto left = static_cast<std::size_t>(block.data() + block.size() - from);
            from = static_cast<const std::uint8_t*>(std::memchr(from, level_protected, left));
            values[static_cast<std::size_t>(from - block.data())] =
                static_cast<Bits>(static_cast<Bits>(protected_values[next]) << bucket_shift<Bits>);
        }
    });
}

#define DYNAQUANT_INSTANTIATE(Bits)                                                                                  \
    template void log_histogram<Bits>(std::span<const Bits>, std::span<std::int64_t, bucket_count>);                 \
    template void assign_levels<Bits>(std::span<const Bits>, std::span<const std::uint8_t, bucket_count>,            \
                                      std::span<const std::uint32_t>, std::span<const std::uint8_t, bucket_count>,   \
                                      std::span<std::uint8_t>);                                                      \
    template void levels_in_turns<Bits>(std::span<const Bits>, std::span<const std::uint8_t, bucket_count>,          \
                                        std::span<const std::uint8_t, bucket_count>, std::span<const std::uint8_t>,  \
                                        std::span<const std::uint8_t>, std::span<std::uint8_t>);                     \
    template void values_of_levels<Bits>(std::span<const std::uint8_t>, std::span<const Bits>,                       \
                                         std::span<const std::uint16_t>, std::span<Bits>);
DYNAQUANT_INSTANTIATE(std::uint32_t)
DYNAQUANT_INSTANTIATE(std::uint16_t)
#undef DYNAQUANT_INSTANTIATE

}  // namespace dynaquant
