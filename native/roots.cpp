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

void divide_plain(const float* values, const float* seconds, std::size_t count, float* out) {
    divide(values, seconds, count, out);
}
void multiply_plain(float* values, const float* seconds, std::size_t count) { multiply(values, seconds, count); }

DYNAQUANT_AVX2 void divide_avx2(const float* values, const float* seconds, std::size_t count, float* out) {
    divide(values, seconds, count, out);
}
DYNAQUANT_AVX2 void multiply_avx2(float* values, const float* seconds, std::size_t count) {
    multiply(values, seconds, count);
}

void divide_row_plain(const float* values, float row, std::span<const float> columns, float* out) {
    divide_row(values, row, columns, out);
}
void multiply_row_plain(float* values, float row, std::span<const float> columns) { multiply_row(values, row, columns); }

DYNAQUANT_AVX2 void divide_row_avx2(const float* values, float row, std::span<const float> columns, float* out) {
    divide_row(values, row, columns, out);
}
DYNAQUANT_AVX2 void multiply_row_avx2(float* values, float row, std::span<const float> columns) {
    multiply_row(values, row, columns);
}

// Calls work for each row, many at a time, in parallel.
template <typename Work>
void for_each_row(std::size_t rows, std::size_t columns, const Work& work) {
    const std::size_t step = std::max<std::size_t>(block_size / std::max<std::size_t>(columns, 1), 1);
    parallel_for(block_count(rows, step), [&](std::size_t b) {
        for (std::size_t row = b * step; row < std::min(rows, (b + 1) * step); ++row) work(row);
    });
}

}  // namespace

void divide_by_roots(std::span<const float> values, std::span<const float> seconds, std::span<float> out) {
    const auto divide_block = has_avx2() ? divide_avx2 : divide_plain;
    parallel_for(block_count(values.size(), block_size), [&](std::size_t b) {
        const std::size_t begin = b * block_size;
        const std::size_t count = std::min(block_size, values.size() - begin);
        divide_block(values.data() + begin, seconds.data() + begin, count, out.data() + begin);
    });
}

void multiply_by_roots(std::span<float> values, std::span<const float> seconds) {
    const auto multiply_block = has_avx2() ? multiply_avx2 : multiply_plain;
    parallel_for(block_count(values.size(), block_size), [&](std::size_t b) {
        const std::size_t begin = b * block_size;
        multiply_block(values.data() + begin, seconds.data() + begin, std::min(block_size, values.size() - begin));
    });
}

void divide_by_roots(std::span<const float> values, std::span<const float> rows, std::span<const float> columns,
                     std::span<float> out) {
    const auto divide_values = has_avx2() ? divide_row_avx2 : divide_row_plain;
    for_each_row(rows.size(), columns.size(), [&](std::size_t row) {
        const std::size_t begin = row * columns.size();
        divide_values(values.data() + begin, rows[row], columns, out.data() + begin);
    });
}

void multiply_by_roots(std::span<float> values, std::span<const float> rows, std::span<const float> columns) {
    const auto multiply_values = has_avx2() ? multiply_row_avx2 : multiply_row_plain;
    for_each_row(rows.size(), columns.size(), [&](std::size_t row) {
        multiply_values(values.data() + row * columns.size(), rows[row], columns);
    });
}

}  // namespace dynaquant
