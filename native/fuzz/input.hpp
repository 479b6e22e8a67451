// How the fuzzers of native/fuzz take an input apart, and the contract that all of them check.
#pragma once

#include <sanitizer/allocator_interface.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace dynaquant::fuzz {

using Bytes = std::vector<std::uint8_t>;

// Takes an input apart from its front. Beyond its end, numbers are 0 and there are no bytes.
class Input {
public:
    Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}

    // Returns a little-endian number of so many bytes.
    std::size_t number(unsigned bytes) {
        std::size_t value = 0;
        for (unsigned shift = 0; const auto byte : take(bytes)) {
            value |= std::size_t{byte} << shift;
            shift += 8;
        }
        return value;
    }

    // Takes at most `given` bytes and returns `size` bytes: those given, again and again. Empty if there are none.
    Bytes tiled(std::size_t given, std::size_t size) {
        const auto tile = take(given);
        Bytes out;
        if (tile.empty()) return out;
        out.reserve(size);
        while (out.size() < size) {
            const auto piece = tile.first(std::min(tile.size(), size - out.size()));
            out.insert(out.end(), piece.begin(), piece.end());
        }
        return out;
    }

    // Returns all bytes that are left, in memory of exactly their size, so that AddressSanitizer sees both ends.
    Bytes rest() {
        const auto bytes = take(left_.size());
        return {bytes.begin(), bytes.end()};
    }

private:
    std::span<const std::uint8_t> take(std::size_t count) {
        const auto taken = left_.first(std::min(count, left_.size()));
        left_ = left_.subspan(taken.size());
        return taken;
    }

    std::span<const std::uint8_t> left_;
};

// Ends the process, so that libFuzzer keeps the input.
inline void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken contract: %s\n", what);
    std::abort();
}

// How many bytes were allocated so far, also those that are free again.
inline std::atomic<std::size_t> allocated{0};
inline const int counting = __sanitizer_install_malloc_and_free_hooks(
    [](const volatile void*, std::size_t size) { allocated += size; }, [](const volatile void*) {});

// Calls work and returns whether it returned. It may throw std::invalid_argument and nothing else, and allocate at most
// `budget` bytes in all.
template <class Work>
bool returns(std::size_t budget, Work&& work) {
    require(counting > 0, "allocations can be counted");
    const std::size_t before = allocated;
    bool returned = true;
    try {
        std::forward<Work>(work)();
    } catch (const std::invalid_argument&) {
        returned = false;
    }
    require(allocated - before <= budget, "a decoder allocates no more than its arguments justify");
    return returned;
}

// Calls decode(out) with `size` bytes to fill. Returns them; empty if decode has thrown. Every byte has to be filled.
template <class Decode>
Bytes decoded(std::size_t size, std::size_t budget, Decode&& decode) {
    Bytes first(size, 0x00);
    if (!returns(budget, [&] { decode(std::span(first)); })) return {};
    Bytes second(size, 0xFF);
    require(returns(budget, [&] { decode(std::span(second)); }), "a decoder reads the same stream again");
    require(first == second, "a decoder fills every value");
    return first;
}

}  // namespace dynaquant::fuzz
