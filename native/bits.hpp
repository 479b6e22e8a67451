// Bit streams. Bits fill each byte from the lowest bit upwards, so the low bits of a value come first.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace dynaquant {

// Streams are little-endian. Parts of them are read and written as machine words, so the machine must be, too.
static_assert(std::endian::native == std::endian::little);

class BitWriter {
public:
    // Appends the low `count` bits of `bits`; the bits above them must be zero. count ≤ 32.
    void put(std::uint32_t bits, unsigned count) {
        buffer_ |= std::uint64_t{bits} << filled_;
        filled_ += count;
        while (filled_ >= 8) {
            bytes_.push_back(static_cast<std::uint8_t>(buffer_));
            buffer_ >>= 8;
            filled_ -= 8;
        }
    }

    // Returns the stream. Zeros fill up its last byte.
    std::vector<std::uint8_t> finish() {
        if (filled_ > 0) bytes_.push_back(static_cast<std::uint8_t>(buffer_));
        return std::move(bytes_);
    }

private:
    std::vector<std::uint8_t> bytes_;
    std::uint64_t buffer_ = 0;
    unsigned filled_ = 0;
};

// Never reads outside its bytes. Past the end, `peek` returns zeros and `take` throws.
class BitReader {
public:
    explicit BitReader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

    // Returns the next `count` bits without consuming them. count ≤ 32.
    std::uint32_t peek(unsigned count) {
        if (available_ < count) refill();
        return static_cast<std::uint32_t>(buffer_ & ((std::uint64_t{1} << count) - 1));
    }

    void take(unsigned count) {
        if (available_ < count) refill();
        if (available_ < count) throw std::invalid_argument("the coded values end too early");
        buffer_ >>= count;
        available_ -= count;
    }

    std::uint32_t get(unsigned count) {
        const std::uint32_t bits = peek(count);
        take(count);
        return bits;
    }

    // Skips the bits up to the next whole byte; throws unless they are zero. Returns the number of bytes read so far.
    std::size_t align() {
        if ((buffer_ & ((std::uint64_t{1} << available_ % 8) - 1)) != 0)
            throw std::invalid_argument("the last byte of a bit stream is not filled up with zeros");
        return position_ - available_ / 8;
    }

    // Throws unless only the zero bits that fill up the last byte are left.
    void expect_end() {
        if (position_ != bytes_.size() || available_ >= 8 || buffer_ != 0)
            throw std::invalid_argument("the coded levels go on after their end");
    }

private:
    void refill() {
        if (bytes_.size() - position_ >= 8) {
            std::uint64_t word;
            std::memcpy(&word, bytes_.data() + position_, 8);
            buffer_ |= word << available_;
            const unsigned added = (63 - available_) / 8;
            position_ += added;
            available_ += 8 * added;
            // Clear the bits of the word beyond the whole bytes that were counted.
            buffer_ &= (std::uint64_t{1} << available_) - 1;
            return;
        }
        while (available_ <= 55 && position_ < bytes_.size()) {
            buffer_ |= std::uint64_t{bytes_[position_++]} << available_;
            available_ += 8;
        }
    }

    std::span<const std::uint8_t> bytes_;
    std::size_t position_ = 0;
    std::uint64_t buffer_ = 0;
    unsigned available_ = 0;
};

}  // namespace dynaquant
