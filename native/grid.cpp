// Values to levels of a uniform grid.
#include "grid.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <vector>

#include "cpu.hpp"
#include "parallel.hpp"
#include "tables.hpp"

namespace dynaquant {
namespace {

constexpr std::size_t block_size = std::size_t{1} << 16;
constexpr std::int32_t highest_level = 255, highest_multiple = 127;
// Outputs of this many floats do not fit into the caches.
[[maybe_unused]] constexpr std::size_t large = std::size_t{1} << 20;
// Roundings of this many values take longer than waking a thread.
constexpr std::size_t worth_a_thread = std::size_t{1} << 18;
// In grid steps. Values farther from zero count as this far: they are protected, and nothing overflows.
constexpr float beyond = 200.0f;

// Rounds to the nearest integer, ties to even: adding and subtracting 1.5 · 2^23 drops all bits below 1. Unlike library
// functions, compilers can vectorise this for every processor.
float nearest(float x) {
    constexpr float shift = 12582912.0f;
    return (x + shift) - shift;
}

// Returns a random number in [0, 1) from an index and a seed, by the finalizer of MurmurHash3.
float uniform(std::uint32_t index, std::uint32_t seed) {
    std::uint32_t h = index * 0x9e3779b1u ^ seed;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    h ^= h >> 16;
    return static_cast<float>(h >> 8) * 0x1p-24f;
}

// Values are processed in pieces by loops over values of one size each, so that compilers vectorise them.
constexpr std::size_t piece_size = 512;

// Sets multiples[i] to the multiple of the step that values[i] is rounded to. first: the index of values[0].
template <bool Stochastic>
[[gnu::always_inline]] inline void round_piece(std::span<const float> values, float inverse, std::uint32_t seed,
                                               std::size_t first, std::int32_t* multiples) {
    for (std::size_t i = 0; i < values.size(); ++i) {
        float steps = values[i] * inverse;
        steps = steps > -beyond ? steps : -beyond;  // NaN, too: its conversion to an integer differs among processors
        steps = steps > beyond ? beyond : steps;
        float rounded = nearest(steps);
        if constexpr (Stochastic) {
            const float below = rounded > steps ? rounded - 1.0f : rounded;
            const bool up = uniform(static_cast<std::uint32_t>(first + i), seed) < steps - below;
            rounded = up ? below + 1.0f : below;
        }
        multiples[i] = static_cast<std::int32_t>(rounded);
    }
}

// Turns multiples into levels and returns the highest: 256 or more if a value is protected. Changes the multiples.
[[gnu::always_inline]] inline std::int32_t levels_of_piece(std::span<std::int32_t> multiples, std::uint8_t* levels) {
    std::int32_t highest = 0;
    for (std::int32_t& each : multiples) {
        const std::int32_t sign = each >> 31;
        each = 2 * ((each ^ sign) - sign) - sign;  // 2 · |multiple|, plus 1 if it is negative
    }
    for (const std::int32_t each : multiples) highest = std::max(highest, each);
    for (std::size_t i = 0; i < multiples.size(); ++i)
        levels[i] = static_cast<std::uint8_t>(multiples[i] > highest_level ? level_protected : multiples[i]);
    return highest;
}

// Quantizes a block and returns its highest level: 256 or more if a value is protected.
template <bool Stochastic>
[[gnu::always_inline]] inline std::int32_t quantize(std::span<const float> values, float inverse, std::uint32_t seed,
                                                    std::size_t first, std::uint8_t* levels) {
    std::int32_t highest = 0;
    std::array<std::int32_t, piece_size> piece;
    for (std::size_t done = 0; done < values.size(); done += piece_size) {
        const std::size_t count = std::min(piece_size, values.size() - done);
        round_piece<Stochastic>(values.subspan(done, count), inverse, seed, first + done, piece.data());
        highest = std::max(highest, levels_of_piece({piece.data(), count}, levels + done));
    }
    return highest;
}

// Returns a value as a protected one is restored: rounded to 16 bits, ties to even, but never to infinity.
float protected_value(float value) {
    constexpr float largest = 0x1.fep127f;
    const auto bits = std::bit_cast<std::uint32_t>(std::clamp(value, -largest, largest));
    return std::bit_cast<float>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

// Sets out to what the levels of a piece of values are restored to. multiples: of the step, from round_piece.
[[gnu::always_inline]] inline void values_of_piece(std::span<const float> values, const std::int32_t* multiples,
                                                   float step, float* out) {
    std::int32_t farthest = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        out[i] = static_cast<float>(multiples[i]) * step;
        farthest = std::max(farthest, std::abs(multiples[i]));
    }
    if (farthest > highest_multiple)  // rare
        for (std::size_t i = 0; i < values.size(); ++i)
            if (std::abs(multiples[i]) > highest_multiple) out[i] = protected_value(values[i]);
}

// Writes a piece of an output.
using Store = void (*)(const float* values, std::size_t count, float* out);

void store_plain(const float* values, std::size_t count, float* out) { std::copy_n(values, count, out); }

#ifdef DYNAQUANT_X86
// Writes past the caches, into which a large output does not fit. A plain write would first read the memory.
DYNAQUANT_AVX2 void store_past_caches(const float* values, std::size_t count, float* out) {
    if (count < piece_size) return store_plain(values, count, out);
    for (std::size_t i = 0; i < piece_size; i += 8) _mm256_stream_ps(out + i, _mm256_load_ps(values + i));
}
#endif

Store store_of([[maybe_unused]] std::size_t size) {
#ifdef DYNAQUANT_X86
    if (has_avx2() && size >= large) return store_past_caches;
#endif
    return store_plain;
}

// Waits for what a thread has written past the caches.
void finish_stores() {
#ifdef DYNAQUANT_X86
    _mm_sfence();
#endif
}

// Rounds a block to the values of its levels. store: writes a piece.
template <bool Stochastic>
[[gnu::always_inline]] inline void round(std::span<const float> values, float inverse, float step, std::uint32_t seed,
                                         std::size_t first, float* out, Store store) {
    alignas(64) std::array<float, piece_size> piece;
    std::array<std::int32_t, piece_size> multiples;
    for (std::size_t done = 0; done < values.size();) {
        // The first piece ends where the output is aligned to a piece, so all others begin there.
        const std::size_t after_border = reinterpret_cast<std::uintptr_t>(out + done) / sizeof(float) % piece_size;
        const std::size_t count = std::min(piece_size - after_border, values.size() - done);
        const auto some = values.subspan(done, count);
        round_piece<Stochastic>(some, inverse, seed, first + done, multiples.data());
        values_of_piece(some, multiples.data(), step, piece.data());
        store(piece.data(), count, out + done);
        done += count;
    }
}

struct Scored {
    Errors errors;
    std::int32_t highest = 0;
};

// Returns what grid_errors does for a block, added up in the order of errors(). levels: null if none are wanted.
template <bool Stochastic>
[[gnu::always_inline]] inline Scored score_block(std::span<const float> values, float inverse, float step,
                                                 std::uint32_t seed, std::size_t first, std::uint8_t* levels) {
    static_assert(piece_size % ErrorSums::lanes == 0);
    ErrorSums sums;
    Scored found;
    std::array<float, piece_size> piece;
    std::array<std::int32_t, piece_size> multiples;
    for (std::size_t done = 0; done < values.size(); done += piece_size) {
        const auto some = values.subspan(done, std::min(piece_size, values.size() - done));
        round_piece<Stochastic>(some, inverse, seed, first + done, multiples.data());
        values_of_piece(some, multiples.data(), step, piece.data());
        sums.add({piece.data(), some.size()}, some.data());
        if (levels != nullptr)
            found.highest = std::max(found.highest, levels_of_piece({multiples.data(), some.size()}, levels + done));
    }
    found.errors = sums.total();
    return found;
}

std::uint32_t capped(std::int32_t highest) { return static_cast<std::uint32_t>(std::min(highest, highest_level + 1)); }

// Adds up what grid_fits returns for one step. There are several sums of each kind: enough for compilers to vectorise.
[[gnu::always_inline]] inline GridFit fit(std::span<const float> values, const double* products, const double* squares,
                                          float inverse) {
    constexpr std::size_t lanes = 16;
    std::array<double, lanes> product{}, square{};
    std::array<float, piece_size> piece;
    std::array<std::int32_t, piece_size> multiples;
    GridFit found;
    for (std::size_t done = 0; done < values.size(); done += piece_size) {
        const std::size_t count = std::min(piece_size, values.size() - done);
        const auto some = values.subspan(done, count);
        round_piece<false>(some, inverse, 0, done, multiples.data());
        std::int32_t farthest = 0;
        for (std::size_t i = 0; i < count; ++i) {
            const std::int32_t distance = std::abs(multiples[i]);
            farthest = std::max(farthest, distance);
            piece[i] = static_cast<float>(distance > highest_multiple ? 0 : multiples[i]);
        }
        const std::size_t whole = count / lanes * lanes;
        for (std::size_t i = 0; i < whole; i += lanes)
            for (std::size_t lane = 0; lane < lanes; ++lane) {
                const double multiple = piece[i + lane];
                product[lane] += multiple * products[done + i + lane];
                square[lane] += multiple * multiple * squares[done + i + lane];
            }
        for (std::size_t i = whole; i < count; ++i) {
            const double multiple = piece[i];
            product[i - whole] += multiple * products[done + i];
            square[i - whole] += multiple * multiple * squares[done + i];
        }
        if (farthest <= highest_multiple) continue;
        for (std::size_t i = 0; i < count; ++i) {  // rare
            if (std::abs(multiples[i]) <= highest_multiple) continue;
            const double value = protected_value(some[i]);
            found.protected_product += value * products[done + i];
            found.protected_square += value * value * squares[done + i];
        }
    }
    for (std::size_t lane = 0; lane < lanes; ++lane) found.product += product[lane], found.square += square[lane];
    return found;
}

}  // namespace

std::uint32_t grid_levels(std::span<const float> values, float inverse, std::optional<std::uint32_t> seed,
                          std::size_t first, std::span<std::uint8_t> levels) {
    const std::size_t blocks = block_count(values.size(), block_size);
    std::vector<std::int32_t> highest(blocks);
    parallel_for(blocks, [&](std::size_t b) {
        const std::size_t begin = b * block_size;
        const auto block = values.subspan(begin, std::min(block_size, values.size() - begin));
        highest[b] = with_widest([&]() DYNAQUANT_INLINED {
            const auto quantized = levels.data() + begin;
            return seed ? quantize<true>(block, inverse, *seed, first + begin, quantized)
                        : quantize<false>(block, inverse, 0, first + begin, quantized);
        });
    });
    const std::int32_t top = highest.empty() ? 0 : *std::max_element(highest.begin(), highest.end());
    return capped(top);
}

void grid_values(std::span<const float> values, float inverse, float step, std::optional<std::uint32_t> seed,
                 std::size_t first, std::span<float> out) {
    const auto store = store_of(values.size());
    parallel_for(block_count(values.size(), block_size), [&](std::size_t b) {
        const std::size_t begin = b * block_size;
        const auto block = values.subspan(begin, std::min(block_size, values.size() - begin));
        with_widest([&]() DYNAQUANT_INLINED {
            const auto rounded = out.data() + begin;
            seed ? round<true>(block, inverse, step, *seed, first + begin, rounded, store)
                 : round<false>(block, inverse, step, 0, first + begin, rounded, store);
        });
        finish_stores();
    });
}

GridErrors grid_errors(std::span<const float> values, float inverse, float step, std::optional<std::uint32_t> seed,
                       std::size_t first, std::span<std::uint8_t> levels) {
    std::vector<Scored> parts(block_count(values.size(), block_size));
    parallel_for(parts.size(), [&](std::size_t b) {
        const std::size_t begin = b * block_size;
        const auto block = values.subspan(begin, std::min(block_size, values.size() - begin));
        const auto here = levels.empty() ? nullptr : levels.data() + begin;
        parts[b] = with_widest([&]() DYNAQUANT_INLINED {
            return seed ? score_block<true>(block, inverse, step, *seed, first + begin, here)
                        : score_block<false>(block, inverse, step, 0, first + begin, here);
        });
    });
    GridErrors found;
    std::int32_t highest = 0;
    for (const Scored& part : parts) {
        found.squares += part.errors.squares, found.errors += part.errors.errors;
        highest = std::max(highest, part.highest);
    }
    found.highest = capped(highest);
    return found;
}

void grid_fits(std::span<const float> values, std::span<const double> products, std::span<const double> squares,
               std::span<const float> inverses, std::span<GridFit> fits) {
    const auto fit_step = [&](std::size_t step) {
        fits[step] = with_widest([&]() DYNAQUANT_INLINED {
            return fit(values, products.data(), squares.data(), inverses[step]);
        });
    };
    if (values.size() * inverses.size() >= worth_a_thread)
        parallel_for(inverses.size(), fit_step);
    else
        for (std::size_t step = 0; step < inverses.size(); ++step) fit_step(step);
}

}  // namespace dynaquant
