// The entropy coder of levels: states and words of one block.
#include "level_rans.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "level_steps.hpp"

namespace dynaquant::level_rans {
namespace {

using Bytes = std::span<const std::uint8_t>;

// Given the parent, most levels take few bits, and a branch for the rare word is predicted well. Without a parent it is
// not, so there is none.

// Encodes levels [begin, end), the last one first.
template <unsigned States, bool WithParent>
void encode_plain(Encoding& block, const std::uint8_t* levels, std::size_t begin, std::size_t end) {
    auto states = block.states;  // local copies: the compiler knows that writing words cannot change them
    std::uint16_t* words = block.words;
    const EncoderStep* const steps = block.table->steps.data();
    const std::size_t columns = block.table->columns;
    const auto put = [&](std::size_t i, unsigned lane) {
        const EncoderStep step = steps[(WithParent ? block.parent[i] * columns : 0) + levels[i]];
        std::uint32_t x = states[lane];
        if constexpr (WithParent) {
            if (step.is_full(x)) {
                *--words = static_cast<std::uint16_t>(x);
                x >>= 16;
            }
        } else {
            const unsigned full = step.is_full(x);
            words[-1] = static_cast<std::uint16_t>(x);
            words -= full;
            x >>= 16 * full;
        }
        states[lane] = step.push(x);
    };
    while (end > begin && end % States != 0) --end, put(end, end % States);
    for (; end >= begin + States; end -= States)
        for (unsigned lane = States; lane-- > 0;) put(end - States + lane, lane);
    block.states = states;
    block.words = words;
}

// Decodes levels [begin, end). begin: a multiple of the number of states.
template <unsigned States, bool WithParent>
void decode_plain(Decoding& block, std::uint8_t* levels, std::size_t begin, std::size_t end) {
    auto states = block.states;
    const std::uint8_t* words = block.words;
    const DecoderTable& table = *block.table;
    const auto get = [&](std::size_t i, unsigned lane) {
        const std::uint8_t source = WithParent ? block.parent[i] : std::uint8_t{0};
        const Slot slot = table.slots_of(source)[states[lane] & (frequency_total - 1)];
        const std::size_t symbol = slot >> 24;
        levels[i] = WithParent ? table.level_of[std::size_t{source} << 8 | symbol] : static_cast<std::uint8_t>(symbol);
        return ((slot >> 12 & 0xFFFu) + 1) * (states[lane] >> frequency_bits) + (slot & 0xFFFu);
    };
    const auto word = [&] { return words[0] | static_cast<std::uint32_t>(words[1]) << 8; };
    const auto get_unchecked = [&](std::size_t i, unsigned lane) {
        std::uint32_t x = get(i, lane);
        if constexpr (WithParent) {
            if (x < lowest_state) {
                x = x << 16 | word();
                words += 2;
            }
        } else {
            const std::uint32_t needy = x < lowest_state;
            x = x << 16 * needy | (word() & (0 - needy));
            words += 2 * needy;
        }
        states[lane] = x;
    };
    for (; begin + States <= end && block.readable - words >= std::ptrdiff_t{2 * States}; begin += States)
        for (unsigned lane = 0; lane < States; ++lane) get_unchecked(begin + lane, lane);
    for (; begin < end; ++begin) {
        std::uint32_t& state = states[begin % States];
        state = get(begin, begin % States);
        if (state >= lowest_state) continue;
        if (block.readable - words < 2) throw std::invalid_argument("the coded levels end too early");
        state = state << 16 | word();
        words += 2;
    }
    block.states = states;
    block.words = words;
}

// Calls work with the number of states, and whether there is a parent, as types.
template <class Work>
void with_constants(unsigned states, bool with_parent, Work&& work) {
    const auto of = [&]<unsigned States>(std::integral_constant<unsigned, States> count) {
        with_parent ? work(count, std::true_type()) : work(count, std::false_type());
    };
    switch (states) {
        case 1: return of(std::integral_constant<unsigned, 1>());
        case 4: return of(std::integral_constant<unsigned, 4>());
        case 8: return of(std::integral_constant<unsigned, 8>());
        case 16: return of(std::integral_constant<unsigned, 16>());
        case 32: return of(std::integral_constant<unsigned, 32>());
        default: throw std::invalid_argument("there must be 1, 4, 8, 16 or 32 states");
    }
}

// Decodes rows of levels with vectors, from `begin` on. Returns how many levels are decoded then.
std::size_t decode_rows([[maybe_unused]] Decoding& block, [[maybe_unused]] unsigned states,
                        [[maybe_unused]] std::span<std::uint8_t> levels, std::size_t begin) {
#ifdef DYNAQUANT_X86
    if (has_avx512() && states % 16 == 0) return decode_rows_avx512(block, states, levels, begin);
    if (has_avx2() && states % 8 == 0) return decode_rows_avx2(block, states, levels, begin);
#elif defined(DYNAQUANT_NEON)
    if (has_neon() && states % 8 == 0) return decode_rows_neon(block, states, levels, begin);
#endif
    return begin;
}

bool encode_rows([[maybe_unused]] Encoding& block, [[maybe_unused]] unsigned states, [[maybe_unused]] Bytes levels) {
#ifdef DYNAQUANT_X86
    if (has_avx512() && states % 16 == 0) return encode_rows_avx512(block, states, levels), true;
    if (has_avx2() && states % 8 == 0) return encode_rows_avx2(block, states, levels), true;
#elif defined(DYNAQUANT_NEON)
    if (has_neon() && states % 8 == 0) return encode_rows_neon(block, states, levels), true;
#endif
    return false;
}

void put16(std::vector<std::uint8_t>& out, std::uint32_t word) {
    out.push_back(static_cast<std::uint8_t>(word));
    out.push_back(static_cast<std::uint8_t>(word >> 8));
}

std::uint32_t get32(const std::uint8_t* at) {
    return at[0] | std::uint32_t{at[1]} << 8 | std::uint32_t{at[2]} << 16 | std::uint32_t{at[3]} << 24;
}

}  // namespace

void encode_block(Bytes levels, const std::uint8_t* parent, const EncoderTable& table, unsigned states,
                  std::vector<std::uint8_t>& out) {
    static thread_local std::vector<std::uint16_t> room;
    // A level takes at most one word.
    if (room.size() < levels.size()) room.resize(levels.size());
    const std::uint16_t* const end = room.data() + levels.size();
    Encoding block{{}, room.data() + levels.size(), parent, &table};
    block.states.fill(lowest_state);

    const std::size_t whole = levels.size() / states * states;
    with_constants(states, parent != nullptr, [&]<class Count, class WithParent>(Count, WithParent) {
        encode_plain<Count::value, WithParent::value>(block, levels.data(), whole, levels.size());
        if (!encode_rows(block, states, levels.first(whole)))
            encode_plain<Count::value, WithParent::value>(block, levels.data(), 0, whole);
    });

    out.reserve(out.size() + 4 * states + 2 * static_cast<std::size_t>(end - block.words));
    for (unsigned lane = 0; lane < states; ++lane) {
        put16(out, block.states[lane] & 0xFFFFu);
        put16(out, block.states[lane] >> 16);
    }
    if constexpr (std::endian::native == std::endian::little) {
        const auto* const bytes = reinterpret_cast<const std::uint8_t*>(block.words);
        out.insert(out.end(), bytes, bytes + 2 * (end - block.words));
    } else {
        for (const std::uint16_t* word = block.words; word != end; ++word) put16(out, *word);
    }
}

void decode_block(Bytes stream, const std::uint8_t* parent, const DecoderTable& table, unsigned states,
                  std::span<std::uint8_t> levels) {
    if (stream.size() < 4 * states) throw std::invalid_argument("the coded levels end too early");
    Decoding block{{}, stream.data() + 4 * states, stream.data() + stream.size(), parent, &table};
    for (unsigned lane = 0; lane < states; ++lane) {
        block.states[lane] = get32(stream.data() + 4 * lane);
        if (block.states[lane] < lowest_state)
            throw std::invalid_argument("the coded levels begin with a state that is too low");
    }

    std::size_t done = decode_rows(block, states, levels, 0);
    const auto left = static_cast<std::size_t>(block.readable - block.words);
    // A row may take as many words as there are states, but mostly takes fewer. So it also goes through the last words
    // with vectors, with zeros behind them.
    std::array<std::uint8_t, 4 * most_states> last{};
    if (left < 2 * states) {
        std::copy(block.words, block.readable, last.begin());
        block.words = last.data();
        block.readable = last.data() + left + 2 * states;
        done = decode_rows(block, states, levels, done);
        block.readable = last.data() + left;
        if (block.words > block.readable) throw std::invalid_argument("the coded levels end too early");
    }
    with_constants(states, parent != nullptr, [&]<class Count, class WithParent>(Count, WithParent) {
        decode_plain<Count::value, WithParent::value>(block, levels.data(), done, levels.size());
    });
    if (block.words != block.readable)
        throw std::invalid_argument("the coded levels have another length than their values");
    for (unsigned lane = 0; lane < states; ++lane)
        if (block.states[lane] != lowest_state) throw std::invalid_argument("the coded levels are damaged");
}

}  // namespace dynaquant::level_rans
