// The contexts of levels: how often each pair of a parent's level and a level occurs, and which contexts share a
// frequency table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "frequencies.hpp"

namespace dynaquant::level_rans {

// Returns memory that this thread keeps, valid until its next call with the same type. It would take longer to get new
// pages from the system for each small tensor than to code it.
template <class T>
std::span<T> cleared(std::size_t size) {
    static thread_local std::vector<T> room;
    room.assign(size, T{});
    return room;
}

// Whether all levels are the same, for example because a moment was dropped. levels: null counts as all 0.
bool is_uniform(const std::uint8_t* levels, std::size_t count);

// Counts pairs of a parent's level and a level, one object at a time on a thread (see cleared). Several threads may add
// blocks.
class PairCounts {
public:
    // rows, columns: more than the highest level of the parent, and than the highest level.
    PairCounts(std::size_t rows, std::size_t columns)
        : columns_(columns), counts_(cleared<std::uint64_t>(rows * columns)) {}

    // Adds a block of less than 2^32 levels. parent: as many, or null if all are 0.
    void add(std::span<const std::uint8_t> levels, const std::uint8_t* parent);

    std::uint64_t of(std::size_t source, std::size_t level) const { return counts_[source * columns_ + level]; }

private:
    const std::size_t columns_;
    std::span<std::uint64_t> counts_;
    std::mutex mutex_;
};

// Contexts that share one frequency table: from `begin` to the beginning of the next group.
struct Group {
    std::size_t begin;
    Counts counts;
    Frequencies frequencies;
    double bits;

    Group(std::size_t from, const Counts& of);
};

// Merges neighbouring contexts as long as that saves bits. counts: of every symbol in every context, at least one
// context.
std::vector<Group> grouped(std::span<const Counts> counts);

}  // namespace dynaquant::level_rans
