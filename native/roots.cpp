// Values in units of the root of a second moment, and back.
#include "roots.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <optional>
#include <stdexcept>

#include "cpu.hpp"
#include "grid.hpp"
#include "parallel.hpp"
#include "tables.hpp"

namespace dynaquant {
namespace {

constexpr std::size_t block_size = std::size_t{1} << 16;
constexpr std::size_t units_at_a_time = 4096;   // they stay in the fastest cache
constexpr std::size_t roots_at_a_time = 16384;  // to look up fewer, the table would take longer than they do

// The root of each value of a table, and zero for levels beyond it.
std::array<float, 256> roots_of(std::span<const float> table) {
    std::array<float, 256> roots{};
    for (std::size_t i = 0; i < std::min(table.size(), roots.size()); ++i) roots[i] = std::sqrt(table[i]);
    return roots;
}

// Sets out to the roots of some levels. Throws std::invalid_argument if one is outside a table of this size.
void look_up_roots(std::span<const std::uint8_t> levels, std::size_t size, const std::array<float, 256>& roots,
                   std::span<float> out) {
    if (highest_of(levels) >= size) throw std::invalid_argument("a level lies outside the codebook");
    look_up(levels, roots, out);
}

[[gnu::always_inline]] inline void divide_by(const float* values, const float* roots, std::size_t count, float* out) {
    for (std::size_t i = 0; i < count; ++i) {
        const float quotient = values[i] / roots[i];
        out[i] = roots[i] == 0.0f ? 0.0f : quotient;
    }
}

[[gnu::always_inline]] inline void divide(const float* values, const float* seconds, std::size_t count, float* out) {
    for (std::size_t i = 0; i < count; ++i) {
        const float root = std::sqrt(seconds[i]);
        const float quotient = values[i] / root;
        out[i] = root == 0.0f ? 0.0f : quotient;
    }
}

[[gnu::always_inline]] inline void multiply(float* values, const float* seconds, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) values[i] *= std::sqrt(seconds[i]);
}

[[gnu::always_inline]] inline void divide_row(const float* values, float row, std::span<const float> columns,
                                              float* out) {
    for (std::size_t i = 0; i < columns.size(); ++i) {
        const float root = std::sqrt(row * columns[i]);
        const float quotient = values[i] / root;
        out[i] = root == 0.0f ? 0.0f : quotient;
    }
}

[[gnu::always_inline]] inline void multiply_row(float* values, float row, std::span<const float> columns) {
    for (std::size_t i = 0; i < columns.size(); ++i) values[i] *= std::sqrt(row * columns[i]);
}

// Keeps the highest level that blocks have, in whatever order they end.
class Highest {
public:
    void add(std::uint32_t level) {
        std::uint32_t before = level_;
        while (before < level && !level_.compare_exchange_weak(before, level)) {}
    }
    std::uint32_t level() const { return level_; }

private:
    std::atomic<std::uint32_t> level_ = 0;
};

// Calls work with the beginning and the number of some values of a block, one after another.
template <std::size_t at_a_time, typename Work>
void for_some(std::size_t size, std::size_t block, const Work& work) {
    const std::size_t end = std::min(size, (block + 1) * block_size);
    for (std::size_t begin = block * block_size; begin < end; begin += at_a_time)
        work(begin, std::min(at_a_time, end - begin));
}

// Calls work for each row, many at a time, in parallel. work: as for with_widest.
template <typename Work>
void for_each_row(std::size_t rows, std::size_t columns, const Work& work) {
    const std::size_t step = std::max<std::size_t>(block_size / std::max<std::size_t>(columns, 1), 1);
    parallel_for(block_count(rows, step), [&](std::size_t b) {
        with_widest([&]() DYNAQUANT_INLINED {
            for (std::size_t row = b * step; row < std::min(rows, (b + 1) * step); ++row) work(row);
        });
    });
}

}  // namespace

void divide_by_roots(std::span<const float> values, std::span<const float> seconds, std::span<float> out) {
    parallel_for(block_count(values.size(), block_size), [&](std::size_t b) {
        const std::size_t begin = b * block_size;
        const std::size_t count = std::min(block_size, values.size() - begin);
        with_widest([&]() DYNAQUANT_INLINED {
            divide(values.data() + begin, seconds.data() + begin, count, out.data() + begin);
        });
    });
}

void multiply_by_roots(std::span<float> values, std::span<const float> seconds) {
    parallel_for(block_count(values.size(), block_size), [&](std::size_t b) {
        const std::size_t begin = b * block_size;
        const std::size_t count = std::min(block_size, values.size() - begin);
        with_widest([&]() DYNAQUANT_INLINED { multiply(values.data() + begin, seconds.data() + begin, count); });
    });
}

void divide_by_roots(std::span<const float> values, std::span<const float> rows, std::span<const float> columns,
                     std::span<float> out) {
    for_each_row(rows.size(), columns.size(), [&](std::size_t row) DYNAQUANT_INLINED {
        const std::size_t begin = row * columns.size();
        divide_row(values.data() + begin, rows[row], columns, out.data() + begin);
    });
}

void multiply_by_roots(std::span<float> values, std::span<const float> rows, std::span<const float> columns) {
    for_each_row(rows.size(), columns.size(), [&](std::size_t row) DYNAQUANT_INLINED {
        multiply_row(values.data() + row * columns.size(), rows[row], columns);
    });
}

void multiply_by_level_roots(std::span<float> values, std::span<const std::uint8_t> levels,
                             std::span<const float> table) {
    const auto roots = roots_of(table);
    parallel_for(block_count(values.size(), block_size), [&](std::size_t b) {
        std::array<float, roots_at_a_time> found;
        for_some<roots_at_a_time>(values.size(), b, [&](std::size_t begin, std::size_t count) {
            look_up_roots(levels.subspan(begin, count), table.size(), roots, {found.data(), count});
            float* const some = values.data() + begin;
            with_widest([&]() DYNAQUANT_INLINED {
                for (std::size_t i = 0; i < count; ++i) some[i] *= found[i];
            });
        });
    });
}

std::uint32_t grid_levels_of_units(std::span<const float> values, std::span<const float> seconds, float inverse,
                                   std::span<std::uint8_t> levels) {
    Highest highest;
    parallel_for(block_count(values.size(), block_size), [&](std::size_t b) {
        std::array<float, units_at_a_time> units;
        for_some<units_at_a_time>(values.size(), b, [&](std::size_t begin, std::size_t count) {
            const std::span some(units.data(), count);
            divide_by_roots(values.subspan(begin, count), seconds.subspan(begin, count), some);
            highest.add(grid_levels(some, inverse, std::nullopt, begin, levels.subspan(begin, count)));
        });
    });
    return highest.level();
}

std::uint32_t grid_levels_of_level_units(std::span<const float> values, std::span<const std::uint8_t> seconds,
                                         std::span<const float> table, float inverse, std::span<std::uint8_t> levels) {
    const auto roots = roots_of(table);
    Highest highest;
    parallel_for(block_count(values.size(), block_size), [&](std::size_t b) {
        std::array<float, roots_at_a_time> units;
        for_some<roots_at_a_time>(values.size(), b, [&](std::size_t begin, std::size_t count) {
            const std::span some(units.data(), count);
            look_up_roots(seconds.subspan(begin, count), table.size(), roots, some);
            with_widest([&]() DYNAQUANT_INLINED { divide_by(values.data() + begin, some.data(), count, some.data()); });
            highest.add(grid_levels(some, inverse, std::nullopt, begin, levels.subspan(begin, count)));
        });
    });
    return highest.level();
}

std::uint32_t grid_levels_of_units(std::span<const float> values, std::span<const float> rows,
                                   std::span<const float> columns, float inverse, std::span<std::uint8_t> levels) {
    if (columns.empty()) return 0;
    Highest highest;
    const std::size_t step = std::max<std::size_t>(block_size / columns.size(), 1);
    const std::size_t height = std::max<std::size_t>(units_at_a_time / columns.size(), 1);
    parallel_for(block_count(rows.size(), step), [&](std::size_t b) {
        std::array<float, units_at_a_time> units;
        const std::size_t end = std::min(rows.size(), (b + 1) * step);
        for (std::size_t row = b * step; row < end; row += height)  // some rows as a whole, or pieces of one
            for (std::size_t column = 0; column < columns.size(); column += units_at_a_time) {
                const auto some_rows = rows.subspan(row, std::min(height, end - row));
                const auto some_columns = columns.subspan(column, std::min(units_at_a_time, columns.size() - column));
                const std::size_t begin = row * columns.size() + column;
                const std::span some(units.data(), some_rows.size() * some_columns.size());
                with_widest([&]() DYNAQUANT_INLINED {
                    for (std::size_t r = 0; r < some_rows.size(); ++r)
                        divide_row(values.data() + begin + r * columns.size(), some_rows[r], some_columns,
                                   some.data() + r * some_columns.size());
                });
                highest.add(grid_levels(some, inverse, std::nullopt, begin, levels.subspan(begin, some.size())));
            }
    });
    return highest.level();
}

}  // namespace dynaquant
