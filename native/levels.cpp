// Levels to bytes and back as published: deltas, run lengths and Huffman codes.
#include "levels.hpp"

#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "bits.hpp"
#include "huffman.hpp"
#include "little_endian.hpp"
#include "parallel.hpp"
#include "runs.hpp"

namespace dynaquant {
namespace {

using Bytes = std::span<const std::uint8_t>;

// Returns where the deltas of each group begin in a block, and where the last group ends.
std::vector<std::size_t> group_starts(Bytes parent, std::size_t block_length, std::size_t groups) {
    std::vector<std::size_t> starts(groups + 1);
    if (groups == 1) {
        starts[1] = block_length;
        return starts;
    }
    for (const auto source : parent) {
        if (source >= groups) throw std::invalid_argument("the parent holds a level outside its codebook");
        ++starts[source + 1u];
    }
    for (std::size_t g = 0; g < groups; ++g) starts[g + 1] += starts[g];
    return starts;
}

// Calls value(v) for each run of equal values, and then run(length) if the run is longer than 1.
template <class Value, class Run>
void for_each_run(Bytes deltas, Value&& value, Run&& run) {
    for (std::size_t i = 0; i < deltas.size();) {
        std::size_t end = i + 1;
        while (end < deltas.size() && deltas[end] == deltas[i]) ++end;
        value(deltas[i]);
        if (end - i > 1) run(end - i);
        i = end;
    }
}

std::uint64_t cost(std::span<const std::uint64_t> frequencies, std::span<const std::uint8_t> lengths,
                   std::size_t modulus) {
    std::uint64_t bits = size_of_lengths(lengths);
    for (std::size_t s = 0; s < frequencies.size(); ++s)
        bits += frequencies[s] * (lengths[s] + (s < modulus ? 0 : run_extra_bits(s - modulus)));
    return bits;
}

void check_shape(std::size_t levels, std::size_t parent, std::size_t modulus, std::size_t groups) {
    if (modulus < 1 || modulus > 256 || groups < 1 || groups > modulus)
        throw std::invalid_argument("levels must be fewer than 257 and groups no more than levels");
    if (parent != 0 && parent != levels) throw std::invalid_argument("the parent has another number of levels");
    if (groups > 1 && parent != levels) throw std::invalid_argument("rearrangement needs the parent's levels");
}

struct Range {
    std::size_t begin, length;
};

Range block_range(std::size_t values, std::size_t block) {
    const std::size_t begin = block * levels_block;
    return {begin, std::min(levels_block, values - begin)};
}

}  // namespace

std::vector<std::uint8_t> encode_levels(Bytes levels, Bytes parent, std::size_t modulus, std::size_t groups,
                                        bool run_length) {
    check_shape(levels.size(), parent.size(), modulus, groups);
    const std::size_t symbols = modulus + run_classes;
    const std::size_t blocks = block_count(levels.size(), levels_block);

    // First pass: rearrange the deltas of every block, and count each symbol with and without run lengths.
    std::vector<std::uint8_t> deltas(levels.size());
    std::vector<std::vector<std::size_t>> starts(blocks);
    const std::size_t table_size = groups * symbols;
    std::vector<std::uint64_t> plain_counts(table_size), run_counts(table_size);
    std::mutex counts_mutex;
    parallel_for(blocks, [&](std::size_t b) {
        const auto [begin, length] = block_range(levels.size(), b);
        const Bytes block = levels.subspan(begin, length);
        const Bytes sources = parent.empty() ? parent : parent.subspan(begin, length);
        starts[b] = group_starts(sources, length, groups);
        std::vector<std::size_t> next(starts[b]);
        std::uint8_t* const out = deltas.data() + begin;
        for (std::size_t i = 0; i < length; ++i) {
            const std::size_t source = sources.empty() ? 0 : sources[i];
            if (block[i] >= modulus || source >= modulus)
                throw std::invalid_argument("a level is not below the modulus");
            const std::size_t delta = source >= block[i] ? source - block[i] : source + modulus - block[i];
            out[next[groups == 1 ? 0 : source]++] = static_cast<std::uint8_t>(delta);
        }
        std::vector<std::uint64_t> block_plain(table_size), block_runs(table_size);
        for (std::size_t g = 0; g < groups; ++g) {
            std::uint64_t* const plain = block_plain.data() + g * symbols;
            std::uint64_t* const runs = block_runs.data() + g * symbols;
            const Bytes group(out + starts[b][g], starts[b][g + 1] - starts[b][g]);
            for_each_run(
                group, [&](std::uint8_t v) { ++runs[v]; },
                [&](std::size_t n) { ++runs[modulus + code_of_run(n).run_class]; });
            for (const auto v : group) ++plain[v];
        }
        const std::lock_guard lock(counts_mutex);
        for (std::size_t i = 0; i < table_size; ++i) {
            plain_counts[i] += block_plain[i];
            run_counts[i] += block_runs[i];
        }
    });

    // Make one Huffman table per group, and decide whether the group uses run lengths.
    std::vector<HuffmanEncoder> codes;
    std::vector<bool> uses_runs;
    BitWriter tables;
    for (std::size_t g = 0; g < groups; ++g) {
        const std::span plain(plain_counts.data() + g * symbols, symbols);
        const std::span runs(run_counts.data() + g * symbols, symbols);
        const auto plain_lengths = code_lengths(plain);
        const auto run_lengths = code_lengths(runs);
        uses_runs.push_back(run_length && cost(runs, run_lengths, modulus) < cost(plain, plain_lengths, modulus));
        const auto& lengths = uses_runs[g] ? run_lengths : plain_lengths;
        put_lengths(tables, lengths);
        codes.emplace_back(lengths);
    }

    // Second pass: write the symbols.
    std::vector<std::vector<std::uint8_t>> coded(blocks);
    parallel_for(blocks, [&](std::size_t b) {
        BitWriter out;
        const std::uint8_t* const block = deltas.data() + block_range(levels.size(), b).begin;
        for (std::size_t g = 0; g < groups; ++g) {
            const Bytes group(block + starts[b][g], starts[b][g + 1] - starts[b][g]);
            if (!uses_runs[g]) {
                for (const auto v : group) codes[g].put(out, v);
                continue;
            }
            for_each_run(
                group, [&](std::uint8_t v) { codes[g].put(out, v); },
                [&](std::size_t n) {
                    const RunCode run = code_of_run(n);
                    codes[g].put(out, modulus + run.run_class);
                    out.put(run.extra, run.extra_bits);
                });
        }
        coded[b] = out.finish();
    });

    std::vector<std::uint8_t> stream;
    const auto table_bytes = tables.finish();
    put_u32(stream, table_bytes.size());
    for (const auto& block : coded) put_u32(stream, block.size());
    stream.insert(stream.end(), table_bytes.begin(), table_bytes.end());
    for (const auto& block : coded) stream.insert(stream.end(), block.begin(), block.end());
    return stream;
}

void decode_levels(Bytes stream, Bytes parent, std::size_t modulus, std::size_t groups,
                   std::span<std::uint8_t> levels) {
    check_shape(levels.size(), parent.size(), modulus, groups);
    const std::size_t symbols = modulus + run_classes;
    const std::size_t blocks = block_count(levels.size(), levels_block);

    const std::size_t table_bytes = get_u32(stream);
    if (stream.size() / 4 < blocks) throw std::invalid_argument("the coded levels end too early");
    std::vector<std::size_t> sizes(blocks);
    for (auto& size : sizes) size = get_u32(stream);
    BitReader tables(get_bytes(stream, table_bytes));
    std::vector<HuffmanDecoder> codes;
    for (std::size_t g = 0; g < groups; ++g) codes.emplace_back(get_lengths(tables, symbols));
    tables.expect_end();
    std::vector<Bytes> coded;
    for (const auto size : sizes) coded.push_back(get_bytes(stream, size));
    if (!stream.empty()) throw std::invalid_argument("the coded levels go on after their end");

    parallel_for(blocks, [&](std::size_t b) {
        const auto [begin, length] = block_range(levels.size(), b);
        const Bytes sources = parent.empty() ? parent : parent.subspan(begin, length);
        const auto starts = group_starts(sources, length, groups);
        std::vector<std::uint8_t> deltas(length);
        BitReader in(coded[b]);
        for (std::size_t g = 0; g < groups; ++g) {
            for (std::size_t i = starts[g]; i < starts[g + 1];) {
                const std::size_t value = codes[g].get(in);
                if (value >= modulus) throw std::invalid_argument("the coded levels hold a run of nothing");
                std::size_t count = 1;
                // After a value comes its run length or another value; after the last value neither.
                if (i + 1 < starts[g + 1]) {
                    const std::size_t symbol = codes[g].peek(in);
                    if (symbol >= modulus) {
                        codes[g].get(in);
                        const std::size_t run_class = symbol - modulus;
                        count = length_of_run(run_class, in.get(run_extra_bits(run_class)));
                    }
                }
                if (count > starts[g + 1] - i) throw std::invalid_argument("the coded levels hold a run too long");
                std::fill_n(deltas.begin() + static_cast<std::ptrdiff_t>(i), count, static_cast<std::uint8_t>(value));
                i += count;
            }
        }
        in.expect_end();
        std::vector<std::size_t> next(starts);
        for (std::size_t i = 0; i < length; ++i) {
            const std::size_t source = sources.empty() ? 0 : sources[i];
            if (source >= modulus) throw std::invalid_argument("the parent holds a level outside its codebook");
            const std::size_t delta = deltas[next[groups == 1 ? 0 : source]++];
            levels[begin + i] = static_cast<std::uint8_t>(source >= delta ? source - delta : source + modulus - delta);
        }
    });
}

}  // namespace dynaquant
