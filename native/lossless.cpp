// Exact values to bytes and back, conditioned on the parent's values.
#include "lossless.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "element_planes.hpp"
#include "little_endian.hpp"
#include "parallel.hpp"
#include "plane_rans.hpp"

namespace dynaquant {
namespace {

using namespace plane_rans;

using Bytes = std::span<const std::uint8_t>;
using Block = std::vector<std::uint8_t>;

enum : std::uint8_t { values_alone = 0, differences = 1 };
enum : std::uint8_t { plane_raw = 0, plane_constant = 1, plane_coded = 2, plane_by_parent = 3, plane_by_previous = 4 };

// Memory that a thread keeps for its next block. Getting new pages from the system would take as long as the coding.
struct Scratch {
    std::vector<std::uint8_t> planes, values;
    std::vector<std::uint8_t> classes = std::vector<std::uint8_t>(lossless_block);
    RansScratch rans;

    std::uint8_t* plane(std::size_t k) {
        if (planes.size() < (k + 1) * lossless_block) planes.resize((k + 1) * lossless_block);
        return planes.data() + k * lossless_block;
    }
};

Scratch& scratch() {
    thread_local Scratch own;
    return own;
}

// Coding a plane costs time, so it must save at least 1/64 of the plane. Classes must save another 1/64.
constexpr std::size_t worthwhile(std::size_t count) { return count / 64; }

// -- Encoding ---------------------------------------------------------------------------------------------------------

constexpr std::size_t strips = 16, strip = 256;

// Calls work with the indices of a sample of the elements, taken in strips.
template <class Work>
void for_sample(std::size_t count, Work&& work) {
    const std::size_t pieces = std::min(strips, (count + strip - 1) / strip);
    for (std::size_t p = 0; p < pieces; ++p) {
        const std::size_t begin = p * (count / pieces);
        for (std::size_t i = begin; i < std::min(begin + strip, count); ++i) work(i);
    }
}

// Counts the bytes in each plane of a sample: of the values, or of the differences if there is a parent.
template <class U>
std::array<Counts, sizeof(U)> sample(const std::uint8_t* values, const std::uint8_t* parent, std::size_t count) {
    std::array<Counts, sizeof(U)> counts{};
    for_sample(count, [&](std::size_t i) {
        U element = folded<U>(values, parent, i);
        for (std::size_t k = sizeof(U); k-- > 0; element = static_cast<U>(element >> 7 >> 1))
            ++counts[k][element & 0xFF];
    });
    return counts;
}

template <std::size_t n>
std::size_t size_of_sample(const std::array<Counts, n>& counts) {
    std::size_t size = 0;
    for (const auto& plane : counts) size += coded_size(plane);
    return size;
}

// Whether coding the plane will probably save bytes. The 1/128 allows for a sample, which looks a little more regular
// than the plane.
bool promising(const Counts& sampled) {
    const std::size_t count = std::accumulate(sampled.begin(), sampled.end(), std::size_t{0});
    return information(sampled) < static_cast<double>(count - count / 128);
}

// Counts each byte. Neighbouring bytes are often equal: different tables avoid waiting for the same counter.
Counts count_bytes(Bytes symbols) {
    constexpr std::size_t ways = 8;
    std::array<Counts, ways> tables{};
    std::size_t i = 0;
    for (; i + ways <= symbols.size(); i += ways) {
        const auto eight = load<std::uint64_t>(symbols.data() + i, 0);  // one read is faster than eight
        for (std::size_t way = 0; way < ways; ++way) ++tables[way][eight >> (8 * way) & 0xFF];
    }
    for (; i < symbols.size(); ++i) ++tables[0][symbols[i]];
    Counts counts{};
    for (const auto& table : tables)
        for (std::size_t s = 0; s < byte_values; ++s) counts[s] += table[s];
    return counts;
}

using ClassCounts = std::array<Counts, class_count>;

// Counts each byte in each class.
ClassCounts count_classes(Bytes symbols, Bytes classes) {
    constexpr std::size_t ways = 2;
    std::array<ClassCounts, ways> tables{};
    for (std::size_t i = 0; i < symbols.size(); ++i) ++tables[i % ways][classes[i]][symbols[i]];
    for (std::size_t c = 0; c < class_count; ++c)
        for (std::size_t s = 0; s < byte_values; ++s) tables[0][c][s] += tables[1][c][s];
    return tables[0];
}

Counts sum_of(const ClassCounts& classed) {
    Counts sum{};
    for (const auto& counts : classed)
        for (std::size_t s = 0; s < byte_values; ++s) sum[s] += counts[s];
    return sum;
}

std::vector<Frequencies> tables_of(std::span<const Counts> counts) {
    std::vector<Frequencies> tables;
    for (const auto& c : counts) tables.push_back(frequencies_of(c));
    return tables;
}

void put_raw(Bytes plane, Block& out) {
    out.push_back(plane_raw);
    out.insert(out.end(), plane.begin(), plane.end());
}

std::size_t plane_size(std::span<const Counts> counts) {
    std::size_t size = sizeof(std::uint32_t) * rans_states;
    for (const auto& c : counts) size += coded_size(c);
    return size;
}

// Returns the smallest index such that at most 1 in 512 of the counted items have a larger one.
unsigned top_of(std::span<const std::uint32_t> counts) {
    const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    std::size_t left = total / 512;
    auto top = static_cast<unsigned>(counts.size() - 1);
    for (; top > 0 && counts[top] <= left; --top) left -= counts[top];
    return top;
}

// Whether classes by the previous byte will probably save enough, judged by a sample.
bool previous_tells(Bytes plane, std::uint8_t top) {
    ClassCounts classed{};
    Counts all{};
    std::size_t sampled = 0;
    for_sample(plane.size(), [&](std::size_t i) {
        ++all[plane[i]];
        ++classed[i < rans_states ? 0 : class_of(top, plane[i - rans_states])][plane[i]];
        ++sampled;
    });
    double size = 0;
    for (const auto& counts : classed) size += information(counts);
    return size + static_cast<double>(worthwhile(sampled)) < information(all);
}

// Appends one plane. classes: from the parent; empty if the block is not coded as differences.
void put_plane(Bytes plane, Bytes classes, Scratch& room, Block& out) {
    ClassCounts classed;
    std::array<Counts, 1> all;
    if (classes.empty()) {
        all[0] = count_bytes(plane);
    } else {
        classed = count_classes(plane, classes);
        all[0] = sum_of(classed);
    }
    if (all[0][plane[0]] == plane.size()) {
        out.push_back(plane_constant);
        out.push_back(plane[0]);
        return;
    }
    const auto top = static_cast<std::uint8_t>(top_of(all[0]));
    const bool by_previous = classes.empty() && previous_tells(plane, top);
    const std::size_t size = plane_size(all);
    if (by_previous) {
        classify_by_previous(plane, top, room.classes.data());
        classes = {room.classes.data(), plane.size()};
        classed = count_classes(plane, classes);
    }
    const std::size_t classed_size = classes.empty() ? size : plane_size(classed);
    if (std::min(size, classed_size) + worthwhile(plane.size()) >= plane.size()) return put_raw(plane, out);
    if (classed_size + worthwhile(plane.size()) >= size) {
        out.push_back(plane_coded);
        return encode_plane(plane, {}, tables_of(all), room.rans, out);
    }
    out.push_back(by_previous ? plane_by_previous : plane_by_parent);
    if (by_previous) out.push_back(top);
    encode_plane(plane, classes, tables_of(classed), room.rans, out);
}

// Returns top_of the exponents of the parent's elements, from a sample.
template <class U>
unsigned top_exponent(const std::uint8_t* parent, std::size_t count) {
    std::array<std::uint32_t, 2048> counts{};
    for_sample(count, [&](std::size_t i) { ++counts[exponent_of(load<U>(parent, i))]; });
    return top_of(counts);
}

template <class U>
Block encode_block(const std::uint8_t* values, const std::uint8_t* parent, std::size_t count) {
    auto sampled = sample<U>(values, nullptr, count);
    if (parent != nullptr) {
        const auto sampled_differences = sample<U>(values, parent, count);
        if (size_of_sample(sampled_differences) < size_of_sample(sampled))
            sampled = sampled_differences;
        else
            parent = nullptr;
    }
    Scratch& room = scratch();
    Planes<U> planes;
    for (std::size_t k = sizeof(U); k-- > 0;) planes[k] = room.plane(k);
    split<U>(values, parent, count, planes);

    Block out;
    out.reserve((sizeof(U) + 1) * count);
    Bytes classes;
    if (parent == nullptr) {
        out.push_back(values_alone);
    } else {
        const unsigned top = top_exponent<U>(parent, count);
        out.push_back(differences);
        out.push_back(static_cast<std::uint8_t>(top));
        out.push_back(static_cast<std::uint8_t>(top >> 8));
        classify<U>(parent, count, top, room.classes.data());
        classes = {room.classes.data(), count};
    }
    for (std::size_t k = 0; k < sizeof(U); ++k) {
        const Bytes plane(planes[k], count);
        if (promising(sampled[k]))
            put_plane(plane, classes, room, out);
        else
            put_raw(plane, out);
    }
    return out;
}

// -- Decoding ---------------------------------------------------------------------------------------------------------

template <class U>
void decode_block(Bytes in, const std::uint8_t* parent, std::size_t count, std::uint8_t* values) {
    const std::uint8_t fold = get_bytes(in, 1)[0];
    if (fold > differences || (fold == differences && parent == nullptr))
        throw std::invalid_argument("the exact values have a block that is neither alone nor a difference");
    if (fold == values_alone) parent = nullptr;
    Scratch& room = scratch();
    const unsigned top = parent == nullptr ? 0 : get_bytes(in, 1)[0];
    const unsigned top_high = parent == nullptr ? 0 : get_bytes(in, 1)[0];
    bool classified = false;

    for (std::size_t k = sizeof(U); k-- > 0;) room.plane(k);
    ConstPlanes<U> planes;
    for (std::size_t k = 0; k < sizeof(U); ++k) {
        const std::span plane(room.plane(k), count);
        planes[k] = plane.data();
        const std::uint8_t mode = get_bytes(in, 1)[0];
        if (mode == plane_raw) {
            planes[k] = get_bytes(in, count).data();
        } else if (mode == plane_constant) {
            std::fill(plane.begin(), plane.end(), get_bytes(in, 1)[0]);
        } else if (mode == plane_coded) {
            decode_plane(in, {}, room.rans, plane);
        } else if (mode == plane_by_parent && parent != nullptr) {
            if (!classified) classify<U>(parent, count, top | top_high << 8, room.classes.data());
            classified = true;
            decode_plane(in, {Classes::given, room.classes.data(), 0}, room.rans, plane);
        } else if (mode == plane_by_previous && parent == nullptr) {
            const std::uint8_t top_byte = get_bytes(in, 1)[0];
            decode_plane(in, {Classes::by_previous, nullptr, top_byte}, room.rans, plane);
        } else {
            throw std::invalid_argument("the exact values have a plane of an unknown kind");
        }
    }
    if (!in.empty()) throw std::invalid_argument("a block of the exact values goes on after its end");
    join<U>(planes, parent, count, values);
}

// -- Blocks -----------------------------------------------------------------------------------------------------------

struct Range {
    std::size_t begin, count;
};

Range block_range(std::size_t elements, std::size_t block) {
    const std::size_t begin = block * lossless_block;
    return {begin, std::min(lossless_block, elements - begin)};
}

// Calls work with a zero of the unsigned type of `itemsize` bytes.
template <class Work>
void with_element(std::size_t itemsize, Work&& work) {
    switch (itemsize) {
        case 1: return work(std::uint8_t{});
        case 2: return work(std::uint16_t{});
        case 4: return work(std::uint32_t{});
        case 8: return work(std::uint64_t{});
        default: throw std::invalid_argument("elements must have 1, 2, 4 or 8 bytes");
    }
}

void check_sizes(std::size_t data, std::size_t parent, std::size_t itemsize) {
    if (itemsize == 0 || data % itemsize != 0) throw std::invalid_argument("the data are not whole elements");
    if (parent != 0 && parent != data) throw std::invalid_argument("the parent has another number of bytes");
}

Block head_of(std::span<const Block> blocks) {
    const bool needs_parent = std::any_of(blocks.begin(), blocks.end(), [](auto& b) { return b[0] == differences; });
    Block head{static_cast<std::uint8_t>(needs_parent)};
    for (const auto& block : blocks) put_u32(head, block.size());
    return head;
}

// A block of a stream: its elements [begin, begin + count), and the parent's from begin on, or null.
struct CodedBlock {
    Bytes stream;
    const std::uint8_t* parent;
    std::size_t begin, count;
};

// Calls work with a zero of the element's type and with each block of a stream of `size` bytes, on several threads.
template <class Work>
void for_coded_blocks(Bytes stream, Bytes parent, std::size_t itemsize, std::size_t size, Work&& work) {
    check_sizes(size, parent.size(), itemsize);
    const std::uint8_t needs_parent = get_bytes(stream, 1)[0];
    if (needs_parent > 1) throw std::invalid_argument("the exact values begin with an unknown byte");
    if (needs_parent == 1 && parent.empty()) throw std::invalid_argument("the exact values need the parent's");
    if (needs_parent == 0) parent = {};
    const std::size_t elements = size / itemsize;
    const std::size_t blocks = block_count(elements, lossless_block);
    if (stream.size() / 4 < blocks) throw std::invalid_argument("the exact values end too early");
    Bytes sizes = get_bytes(stream, 4 * blocks);
    std::vector<Bytes> coded;
    for (std::size_t b = 0; b < blocks; ++b) coded.push_back(get_bytes(stream, get_u32(sizes)));
    if (!stream.empty()) throw std::invalid_argument("the exact values go on after their end");
    with_element(itemsize, [&]<class U>(U zero) {
        parallel_for(blocks, [&](std::size_t b) {
            const auto [begin, count] = block_range(elements, b);
            work(zero, CodedBlock{coded[b], parent.empty() ? nullptr : parent.data() + begin * itemsize, begin, count});
        });
    });
}

}  // namespace

std::vector<Block> encode_lossless(Bytes data, Bytes parent, std::size_t itemsize) {
    check_sizes(data.size(), parent.size(), itemsize);
    const std::size_t elements = data.size() / itemsize;
    std::vector<Block> pieces(1 + block_count(elements, lossless_block));
    const std::span blocks(pieces.data() + 1, pieces.size() - 1);
    with_element(itemsize, [&]<class U>(U) {
        parallel_for(blocks.size(), [&](std::size_t b) {
            const auto [begin, count] = block_range(elements, b);
            const std::uint8_t* const source = parent.empty() ? nullptr : parent.data() + begin * itemsize;
            blocks[b] = encode_block<U>(data.data() + begin * itemsize, source, count);
        });
    });
    pieces[0] = head_of(blocks);
    return pieces;
}

void decode_lossless(Bytes stream, Bytes parent, std::size_t itemsize, std::span<std::uint8_t> data) {
    for_coded_blocks(stream, parent, itemsize, data.size(), [&]<class U>(U, const CodedBlock& block) {
        decode_block<U>(block.stream, block.parent, block.count, data.data() + block.begin * sizeof(U));
    });
}

bool decodes_to(Bytes stream, Bytes parent, std::size_t itemsize, Bytes data) {
    std::atomic<bool> same = true;
    for_coded_blocks(stream, parent, itemsize, data.size(), [&]<class U>(U, const CodedBlock& block) {
        auto& values = scratch().values;
        if (values.size() < lossless_block * sizeof(U)) values.resize(lossless_block * sizeof(U));
        decode_block<U>(block.stream, block.parent, block.count, values.data());
        if (std::memcmp(values.data(), data.data() + block.begin * sizeof(U), block.count * sizeof(U)) != 0)
            same = false;
    });
    return same;
}

}  // namespace dynaquant
