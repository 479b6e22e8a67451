// Little-endian numbers and spans of bytes of a stream. Never reads beyond the end of the stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

namespace dynaquant {

inline void put_u32(std::vector<std::uint8_t>& out, std::size_t value) {
    for (unsigned shift = 0; shift < 32; shift += 8) out.push_back(static_cast<std::uint8_t>(value >> shift));
}

inline std::span<const std::uint8_t> get_bytes(std::span<const std::uint8_t>& in, std::size_t count) {
    if (in.size() < count) throw std::invalid_argument("the coded values end too early");
    const auto out = in.first(count);
    in = in.subspan(count);
    return out;
}

inline std::size_t get_u32(std::span<const std::uint8_t>& in) {
    std::size_t value = 0;
    for (unsigned shift = 0; const auto byte : get_bytes(in, 4)) {
        value |= std::size_t{byte} << shift;
        shift += 8;
    }
    return value;
}

}  // namespace dynaquant
