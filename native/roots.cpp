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

}  // namespace dynaquant
