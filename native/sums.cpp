// Sums of many floats in double precision, and their extremes.
#include "sums.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "cpu.hpp"
#include "parallel.hpp"

namespace dynaquant {
namespace {

constexpr std::size_t block_size = std::size_t{1} << 16;
constexpr std::size_t tile_rows = 1024, tile_columns = 2048;
constexpr std::size_t lanes = ErrorSums::lanes;  // independent sums

struct Tile {
    const float* first;
    std::size_t rows, columns, stride;
};

[[gnu::always_inline]] inline Sums sums_of_block(std::span<const float> values) {
    std::array<double, lanes> total{}, squares{};
    const std::size_t whole = values.size() / lanes * lanes;
    for (std::size_t i = 0; i < whole; i += lanes)
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            const double value = values[i + lane];
            total[lane] += value;
            squares[lane] += value * value;
        }
    for (std::size_t i = whole; i < values.size(); ++i) {
        const double value = values[i];
        total[i - whole] += value;
        squares[i - whole] += value * value;
    }
    Sums result;
    for (std::size_t lane = 0; lane < lanes; ++lane) result.values += total[lane], result.squares += squares[lane];
    return result;
}

[[gnu::always_inline]] inline float itself(float value) { return value; }
[[gnu::always_inline]] inline float square(float value) { return value * value; }

// Adds to column_sums; sets row_sums. Sums up what `of` returns for each value.
template <typename Of>
[[gnu::always_inline]] inline void sums_of_tile(const Tile& tile, double* row_sums, std::size_t row_stride,
                                                double* column_sums, const Of& of) {
    const std::size_t whole = tile.columns / lanes * lanes;
    for (std::size_t row = 0; row < tile.rows; ++row) {
        const float* const values = tile.first + row * tile.stride;
        std::array<double, lanes> total{};
        for (std::size_t i = 0; i < whole; i += lanes)
            for (std::size_t lane = 0; lane < lanes; ++lane) {
                const double value = of(values[i + lane]);
                total[lane] += value;
                column_sums[i + lane] += value;
            }
        for (std::size_t i = whole; i < tile.columns; ++i) {
            const double value = of(values[i]);
            total[i - whole] += value;
            column_sums[i] += value;
        }
        double sum = 0.0;
        for (const double part : total) sum += part;
        row_sums[row * row_stride] = sum;
    }
}

[[gnu::always_inline]] inline Errors errors_of_block(std::span<const float> values, const float* exact) {
    ErrorSums sums;
    sums.add(values, exact);
    return sums.total();
}

Errors errors_plain(std::span<const float> values, const float* exact) { return errors_of_block(values, exact); }
DYNAQUANT_AVX2 Errors errors_avx2(std::span<const float> values, const float* exact) {
    return errors_of_block(values, exact);
}

// The bits of a float as an integer that is ordered as floats are. (Compilers vectorise extremes of integers only: those
// of floats depend on the order if there are NaNs.) NaNs are above infinity or below minus infinity. It is its own
// inverse.
constexpr std::int32_t ordered(std::int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
constexpr std::int32_t infinity = 0x7f800000, minus_infinity = ordered(static_cast<std::int32_t>(0xff800000));

struct Order {
    std::int32_t lowest = infinity, highest = minus_infinity;
};

[[gnu::always_inline]] inline Order extremes_of_block(std::span<const float> values) {
    Order found;
    for (const float value : values) {
        const std::int32_t place = ordered(std::bit_cast<std::int32_t>(value));
        found.lowest = std::min(found.lowest, place);
        found.highest = std::max(found.highest, place);
    }
    return found;
}

Order extremes_plain(std::span<const float> values) { return extremes_of_block(values); }
DYNAQUANT_AVX2 Order extremes_avx2(std::span<const float> values) { return extremes_of_block(values); }

[[gnu::always_inline]] inline std::int32_t smallest_of_block(std::span<const float> values, std::int32_t limit) {
    std::int32_t smallest = infinity;
    for (const float value : values) {  // positive floats are ordered as their bits are, negative ones are below zero
        const std::int32_t place = std::bit_cast<std::int32_t>(value);
        smallest = std::min(smallest, place >= limit ? place : infinity);
    }
    return smallest;
}

std::int32_t smallest_plain(std::span<const float> values, std::int32_t limit) { return smallest_of_block(values, limit); }
DYNAQUANT_AVX2 std::int32_t smallest_avx2(std::span<const float> values, std::int32_t limit) {
    return smallest_of_block(values, limit);
}

Sums block_plain(std::span<const float> values) { return sums_of_block(values); }
void tile_plain(const Tile& tile, double* row_sums, std::size_t row_stride, double* column_sums) {
    sums_of_tile(tile, row_sums, row_stride, column_sums, itself);
}
void square_tile_plain(const Tile& tile, double* row_sums, std::size_t row_stride, double* column_sums) {
    sums_of_tile(tile, row_sums, row_stride, column_sums, square);
}

DYNAQUANT_AVX2 Sums block_avx2(std::span<const float> values) { return sums_of_block(values); }
DYNAQUANT_AVX2 void tile_avx2(const Tile& tile, double* row_sums, std::size_t row_stride, double* column_sums) {
    sums_of_tile(tile, row_sums, row_stride, column_sums, itself);
}
DYNAQUANT_AVX2 void square_tile_avx2(const Tile& tile, double* row_sums, std::size_t row_stride, double* column_sums) {
    sums_of_tile(tile, row_sums, row_stride, column_sums, square);
}

// Returns what `of` returns for each block of the values and the index where it begins. Blocks are done in parallel.
template <typename Part, typename Of>
std::vector<Part> by_block(std::span<const float> values, const Of& of) {
    std::vector<Part> found(block_count(values.size(), block_size));
    parallel_for(found.size(), [&](std::size_t b) {
        const std::size_t begin = b * block_size;
        found[b] = of(values.subspan(begin, std::min(block_size, values.size() - begin)), begin);
    });
    return found;
}

}  // namespace

Sums sums(std::span<const float> values) {
    const auto of_block = has_avx2() ? block_avx2 : block_plain;
    Sums result;
    for (const auto& part : by_block<Sums>(values, [&](auto block, std::size_t) { return of_block(block); }))
        result.values += part.values, result.squares += part.squares;
    return result;
}

Errors errors(std::span<const float> values, std::span<const float> exact) {
    const auto of_block = has_avx2() ? errors_avx2 : errors_plain;
    const auto with_exact = [&](auto block, std::size_t begin) { return of_block(block, exact.data() + begin); };
    Errors result;
    for (const auto& part : by_block<Errors>(values, with_exact)) result.squares += part.squares, result.errors += part.errors;
    return result;
}

Extremes extremes(std::span<const float> values) {
    if (values.empty()) throw std::invalid_argument("there are no values");
    const auto of_block = has_avx2() ? extremes_avx2 : extremes_plain;
    Order whole;
    for (const auto& part : by_block<Order>(values, [&](auto block, std::size_t) { return of_block(block); }))
        whole = {std::min(whole.lowest, part.lowest), std::max(whole.highest, part.highest)};
    if (whole.lowest < minus_infinity || whole.highest > infinity)
        return {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::quiet_NaN()};
    return {std::bit_cast<float>(ordered(whole.lowest)), std::bit_cast<float>(ordered(whole.highest))};
}

float smallest_from(std::span<const float> values, float limit) {
    const auto of_block = has_avx2() ? smallest_avx2 : smallest_plain;
    const auto bits = std::bit_cast<std::int32_t>(limit);
    std::int32_t smallest = infinity;
    for (const auto part : by_block<std::int32_t>(values, [&](auto block, std::size_t) { return of_block(block, bits); }))
        smallest = std::min(smallest, part);
    return std::bit_cast<float>(smallest);
}

static void sum_tiles(std::span<const float> values, std::span<double> row_sums, std::span<double> column_sums,
               void (*of_tile)(const Tile&, double*, std::size_t, double*)) {
    const std::size_t rows = row_sums.size(), columns = column_sums.size();
    const std::size_t down = block_count(rows, tile_rows), across = block_count(columns, tile_columns);
    std::vector<double> row_parts(rows * across), column_parts(down * columns);
    parallel_for(down * across, [&](std::size_t t) {
        const std::size_t row = t / across * tile_rows, column = t % across * tile_columns;
        const Tile tile{values.data() + row * columns + column, std::min(tile_rows, rows - row),
                        std::min(tile_columns, columns - column), columns};
        of_tile(tile, row_parts.data() + row * across + t % across, across,
                column_parts.data() + t / across * columns + column);
    });
    for (std::size_t row = 0; row < rows; ++row) {
        row_sums[row] = 0.0;
        for (std::size_t part = 0; part < across; ++part) row_sums[row] += row_parts[row * across + part];
    }
    std::fill(column_sums.begin(), column_sums.end(), 0.0);
    for (std::size_t part = 0; part < down; ++part)
        for (std::size_t column = 0; column < columns; ++column)
            column_sums[column] += column_parts[part * columns + column];
}

void row_and_column_sums(std::span<const float> values, std::span<double> row_sums, std::span<double> column_sums) {
    sum_tiles(values, row_sums, column_sums, has_avx2() ? tile_avx2 : tile_plain);
}

void row_and_column_squares(std::span<const float> values, std::span<double> row_sums,
                            std::span<double> column_sums) {
    sum_tiles(values, row_sums, column_sums, has_avx2() ? square_tile_avx2 : square_tile_plain);
}

}  // namespace dynaquant
