// Frequency tables of symbols.
#include "frequencies.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>

namespace dynaquant::level_rans {
namespace {

// A frequency is written as its width in bits and its highest bits. The error of up to 1/32 costs almost nothing.
constexpr unsigned mantissa_bits = 4;
constexpr unsigned width_bits = 4;
constexpr unsigned run_bits = 4;
constexpr unsigned symbol_bits = 8;

struct Rounded {
    unsigned width;
    unsigned extra_bits;
    std::uint32_t extra;
    std::uint32_t value;
};

Rounded rounded(std::uint32_t frequency) {
    const auto width = static_cast<unsigned>(std::bit_width(frequency));
    const unsigned extra_bits = std::min(width - 1, mantissa_bits);
    const unsigned dropped = width - 1 - extra_bits;
    const std::uint32_t kept = frequency >> dropped;
    return {width, extra_bits, kept & ((1u << extra_bits) - 1), kept << dropped};
}

// Returns the most frequent symbol. Its frequency is not written: it is the rest of 4096.
template <class Table>
std::size_t rest_of(const Table& frequencies, std::size_t end) {
    const auto first = frequencies.begin();
    return static_cast<std::size_t>(std::max_element(first, first + static_cast<std::ptrdiff_t>(end)) - first);
}

// Returns one more than the last symbol that occurs. It is mostly far below 256, which makes the loops shorter.
template <class Table>
std::size_t end_of(const Table& counts) {
    std::size_t end = counts.size();
    while (end > 0 && counts[end - 1] == 0) --end;
    return end;
}

double log2_of(std::uint32_t frequency) {
    static const auto table = [] {
        std::array<double, frequency_total + 1> logarithms{};
        for (std::uint32_t f = 1; f <= frequency_total; ++f) logarithms[f] = std::log2(f);
        return logarithms;
    }();
    return table[frequency];
}

std::size_t last_of(const Frequencies& frequencies, std::size_t rest, std::size_t end) {
    std::size_t last = end;
    while (last > 0 && (frequencies[last - 1] == 0 || last - 1 == rest)) --last;
    return last;
}

std::size_t zeros_from(const Frequencies& frequencies, std::size_t rest, std::size_t at, std::size_t last) {
    std::size_t run = 0;
    while (run < (std::size_t{1} << run_bits) && at + run < last && frequencies[at + run] == 0 && at + run != rest) ++run;
    return run;
}

}  // namespace

Frequencies scaled(const Counts& counts) {
    Frequencies result{};
    const std::size_t end = end_of(counts);
    std::uint64_t total = 0;
    for (std::size_t s = 0; s < end; ++s) total += counts[s];
    if (total == 0) return result;
    const std::size_t rest = rest_of(counts, end);
    std::uint32_t sum = 0;
    for (std::size_t s = 0; s < end; ++s) {
        if (counts[s] == 0 || s == rest) continue;
        const double share = static_cast<double>(counts[s]) / static_cast<double>(total);
        const auto nearest = static_cast<std::uint32_t>(std::lround(share * frequency_total));
        result[s] = rounded(std::max(nearest, 1u)).value;
        sum += result[s];
    }
    // Every symbol gets at least 1 of 4096, so many rare symbols can take too much. Then reduce the largest
    // frequencies.
    while (sum >= frequency_total) {
        const std::size_t largest = rest_of(result, end);
        const std::uint32_t less = rounded(result[largest] - 1).value;
        sum -= result[largest] - less;
        result[largest] = less;
    }
    result[rest] = frequency_total - sum;
    // If the rare symbols have taken much, another symbol is now the most frequent one, and so gets the rest.
    if (const std::size_t largest = rest_of(result, end); largest != rest) {
        const std::uint32_t kept = rounded(result[rest]).value;
        result[largest] += result[rest] - kept;
        result[rest] = kept;
    }
    return result;
}

void put_frequencies(BitWriter& out, const Frequencies& frequencies) {
    const std::size_t end = end_of(frequencies), rest = rest_of(frequencies, end);
    const std::size_t last = last_of(frequencies, rest, end);
    out.put(static_cast<std::uint32_t>(rest), symbol_bits);
    out.put(static_cast<std::uint32_t>(last), symbol_bits + 1);
    for (std::size_t s = 0; s < last;) {
        if (s == rest) {
            ++s;
            continue;
        }
        if (const std::size_t run = zeros_from(frequencies, rest, s, last); run > 0) {
            out.put(0, width_bits);
            out.put(static_cast<std::uint32_t>(run - 1), run_bits);
            s += run;
            continue;
        }
        const Rounded written = rounded(frequencies[s++]);
        out.put(written.width, width_bits);
        out.put(written.extra, written.extra_bits);
    }
}

Frequencies get_frequencies(BitReader& in, std::size_t symbols) {
    const auto wrong = [] { throw std::invalid_argument("a frequency table is damaged"); };
    Frequencies result{};
    const std::size_t rest = in.get(symbol_bits);
    const std::size_t last = in.get(symbol_bits + 1);
    if (rest >= symbols || last > symbols) wrong();
    std::uint32_t sum = 0;
    for (std::size_t s = 0; s < last;) {
        if (s == rest) {
            ++s;
            continue;
        }
        const unsigned width = in.get(width_bits);
        if (width == 0) {
            const std::size_t run = in.get(run_bits) + 1;
            if (run > last - s || (s < rest && rest < s + run)) wrong();
            s += run;
            continue;
        }
        if (width > frequency_bits) wrong();
        const unsigned extra_bits = std::min(width - 1, mantissa_bits);
        result[s] = ((1u << extra_bits) | in.get(extra_bits)) << (width - 1 - extra_bits);
        sum += result[s++];
    }
    if (sum >= frequency_total) wrong();
    result[rest] = frequency_total - sum;
    return result;
}

double bits_of(const Counts& counts, const Frequencies& frequencies) {
    const std::size_t end = end_of(frequencies), rest = rest_of(frequencies, end);
    const std::size_t last = last_of(frequencies, rest, end);
    double bits = 2 * symbol_bits + 1;
    for (std::size_t s = 0; s < end; ++s) {
        if (counts[s] == 0) continue;
        bits += static_cast<double>(counts[s]) * (frequency_bits - log2_of(frequencies[s]));
        if (s < last && s != rest) bits += width_bits + rounded(frequencies[s]).extra_bits;
    }
    for (std::size_t s = 0; s < last; ++s)
        if (const std::size_t run = zeros_from(frequencies, rest, s, last); run > 0) {
            bits += width_bits + run_bits;
            s += run - 1;
        }
    return bits;
}

}  // namespace dynaquant::level_rans
