// Values in units of the root of a second moment, and back.
#include "roots.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "cpu.hpp"
#include "parallel.hpp"

namespace dynaquant {
namespace {

constexpr std::size_t block_size = std::size_t{1} << 16;

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

}  // namespace dynaquant
