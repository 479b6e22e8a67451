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

// The bits of a float as an integer that is ordered as floats are. (Compilers vectorise extremes of integers only: those
// of floats depend on the order if there are NaNs.) NaNs are above infinity or below minus infinity. It is its own
// inverse.
constexpr std::int32_t ordered(std::int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
constexpr std::int32_t infinity = 0x7f800000, minus_infinity = ordered(static_cast<std::int32_t>(0xff800000));

struct Order {
    std::int32_t lowest = infinity, highest = minus_infinity, smallest = infinity;
};

ExtremesFrom extremes_of(std::span<const Order> parts) {
    Order whole;
    for (const Order& part : parts)
        whole = {std::min(whole.lowest, part.lowest), std::max(whole.highest, part.highest),
                 std::min(whole.smallest, part.smallest)};
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    if (whole.lowest < minus_infinity || whole.highest > infinity) return {{nan, nan}, nan};
    const auto value = [](std::int32_t place) { return std::bit_cast<float>(ordered(place)); };
    return {{value(whole.lowest), value(whole.highest)}, value(whole.smallest)};
}

constexpr auto itself = [](float value) DYNAQUANT_INLINED { return value; };
constexpr auto square = [](float value) DYNAQUANT_INLINED { return value * value; };

// Adds to column_sums; sets row_sums. Sums up what `of` returns for each value. Returns the extremes of the values, if wanted.
template <bool wants_extremes, typename Of>
[[gnu::always_inline]] inline Order sums_of_tile(const Tile& tile, double* row_sums, std::size_t row_stride,
                                                 double* column_sums, const Of& of) {
    std::array<std::int32_t, lanes> lowest, highest;
    lowest.fill(infinity);
    highest.fill(minus_infinity);
    const auto compare = [&](float value, std::size_t lane) {
        if (!wants_extremes) return;
        const std::int32_t place = ordered(std::bit_cast<std::int32_t>(value));
        lowest[lane] = std::min(lowest[lane], place);
        highest[lane] = std::max(highest[lane], place);
    };
    const std::size_t whole = tile.columns / lanes * lanes;
    for (std::size_t row = 0; row < tile.rows; ++row) {
        const float* const values = tile.first + row * tile.stride;
        std::array<double, lanes> total{};
        for (std::size_t i = 0; i < whole; i += lanes)
            for (std::size_t lane = 0; lane < lanes; ++lane) {
                const double value = of(values[i + lane]);
                total[lane] += value;
                column_sums[i + lane] += value;
                compare(values[i + lane], lane);
            }
        for (std::size_t i = whole; i < tile.columns; ++i) {
            const double value = of(values[i]);
            total[i - whole] += value;
            column_sums[i] += value;
            compare(values[i], i - whole);
        }
        double sum = 0.0;
        for (const double part : total) sum += part;
        row_sums[row * row_stride] = sum;
    }
    return {*std::min_element(lowest.begin(), lowest.end()), *std::max_element(highest.begin(), highest.end())};
}

[[gnu::always_inline]] inline Errors errors_of_block(std::span<const float> values, const float* exact) {
    ErrorSums sums;
    sums.add(values, exact);
    return sums.total();
}

// limit: of the smallest, ordered.
[[gnu::always_inline]] inline Order extremes_of_block(std::span<const float> values, std::int32_t limit) {
    Order found;
    for (const float value : values) {
        const std::int32_t place = ordered(std::bit_cast<std::int32_t>(value));
        found.lowest = std::min(found.lowest, place);
        found.highest = std::max(found.highest, place);
        found.smallest = std::min(found.smallest, place >= limit ? place : infinity);
    }
    return found;
}

// Returns what `of` returns for each block of the values and the index where it begins. Blocks are done in parallel.
// of: as for with_widest.
template <typename Part, typename Of>
std::vector<Part> by_block(std::span<const float> values, const Of& of) {
    std::vector<Part> found(block_count(values.size(), block_size));
    parallel_for(found.size(), [&](std::size_t b) {
        const std::size_t begin = b * block_size;
        const auto block = values.subspan(begin, std::min(block_size, values.size() - begin));
        found[b] = with_widest([&]() DYNAQUANT_INLINED { return of(block, begin); });
    });
    return found;
}

// Sets the sums of all rows and columns of what `of`, a lambda, returns for each value. Returns the extremes of the values, if wanted.
template <bool wants_extremes, typename Of>
Extremes sum_tiles(std::span<const float> values, std::span<double> row_sums, std::span<double> column_sums, const Of& of) {
    const std::size_t rows = row_sums.size(), columns = column_sums.size();
    const std::size_t down = block_count(rows, tile_rows), across = block_count(columns, tile_columns);
    std::vector<double> row_parts(rows * across), column_parts(down * columns);
    std::vector<Order> orders(down * across);
    parallel_for(orders.size(), [&](std::size_t t) {
        const std::size_t row = t / across * tile_rows, column = t % across * tile_columns;
        const Tile tile{values.data() + row * columns + column, std::min(tile_rows, rows - row),
                        std::min(tile_columns, columns - column), columns};
        orders[t] = with_widest([&]() DYNAQUANT_INLINED {
            return sums_of_tile<wants_extremes>(tile, row_parts.data() + row * across + t % across, across,
                                                column_parts.data() + t / across * columns + column, of);
        });
    });
    for (std::size_t row = 0; row < rows; ++row) {
        row_sums[row] = 0.0;
        for (std::size_t part = 0; part < across; ++part) row_sums[row] += row_parts[row * across + part];
    }
    std::fill(column_sums.begin(), column_sums.end(), 0.0);
    for (std::size_t part = 0; part < down; ++part)
        for (std::size_t column = 0; column < columns; ++column)
            column_sums[column] += column_parts[part * columns + column];
    return extremes_of(orders);
}

}  // namespace

Sums sums(std::span<const float> values) {
    const auto of_block = [](auto block, std::size_t) DYNAQUANT_INLINED { return sums_of_block(block); };
    Sums result;
    for (const auto& part : by_block<Sums>(values, of_block))
        result.values += part.values, result.squares += part.squares;
    return result;
}

Errors errors(std::span<const float> values, std::span<const float> exact) {
    const auto of_block = [&](auto block, std::size_t begin)
                              DYNAQUANT_INLINED { return errors_of_block(block, exact.data() + begin); };
    Errors result;
    for (const auto& part : by_block<Errors>(values, of_block)) result.squares += part.squares, result.errors += part.errors;
    return result;
}

Extremes extremes(std::span<const float> values) {
    return extremes_from(values, std::numeric_limits<float>::infinity());
}

ExtremesFrom extremes_from(std::span<const float> values, float limit) {
    if (values.empty()) throw std::invalid_argument("there are no values");
    const std::int32_t from = ordered(std::bit_cast<std::int32_t>(limit));
    const auto of_block = [&](auto block, std::size_t) DYNAQUANT_INLINED { return extremes_of_block(block, from); };
    return extremes_of(by_block<Order>(values, of_block));
}

void row_and_column_sums(std::span<const float> values, std::span<double> row_sums, std::span<double> column_sums) {
    sum_tiles<false>(values, row_sums, column_sums, itself);
}

Extremes row_and_column_squares(std::span<const float> values, std::span<double> row_sums,
                                std::span<double> column_sums) {
    return sum_tiles<true>(values, row_sums, column_sums, square);
}

}  // namespace dynaquant
