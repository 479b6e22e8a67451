// Passes over values with tables of 65,536 entries, indexed by the top 16 bits of a float (docs/architecture.md,
// "Buckets").
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dynaquant {

inline constexpr std::size_t bucket_count = 65536;

// The two levels that are not bins (docs/format.md, "Levels").
inline constexpr std::uint8_t level_pruned = 0;
inline constexpr std::uint8_t level_protected = 1;
// In a sensitivity table: sensitivity does not decide about this weight.
inline constexpr std::uint8_t undecided = 255;

// Returns the highest level, 0 if there are none.
std::uint8_t highest_of(std::span<const std::uint8_t> levels);

// Adds to counts[b] the number of values whose top 16 bits are b. Bits is uint32_t (float32) or uint16_t.
template <class Bits>
void log_histogram(std::span<const Bits> values, std::span<std::int64_t, bucket_count> counts);

// Sets levels[i] to table[bucket of values[i]]. If the sensitivity table prunes or protects the weight, that decides
// instead. Protection, by either table, has precedence over pruning. sensitivity: empty or as long as values.
template <class Bits>
void assign_levels(std::span<const Bits> values, std::span<const std::uint8_t, bucket_count> table,
                   std::span<const std::uint32_t> sensitivity,
                   std::span<const std::uint8_t, bucket_count> sensitivity_table, std::span<std::uint8_t> levels);

// Sets levels[i] to low[bucket of values[i]], or to high where goes_up[turn * 256 + that level]. turns: of each row of the
// values, fewer than there are rows of 256 in goes_up.
template <class Bits>
void levels_in_turns(std::span<const Bits> values, std::span<const std::uint8_t, bucket_count> low,
                     std::span<const std::uint8_t, bucket_count> high, std::span<const std::uint8_t> goes_up,
                     std::span<const std::uint8_t> turns, std::span<std::uint8_t> levels);

// Returns where the protected levels are.
std::vector<std::int64_t> protected_places(std::span<const std::uint8_t> levels);

// Sets out[i] to table[levels[i]].
void look_up(std::span<const std::uint8_t> levels, const std::array<float, 256>& table, std::span<float> out);

// Sets out[i] to table[levels[i]]. Each level_protected takes the next of the protected values, which are the top 16
// bits of an output value. Throws std::invalid_argument if a level is outside the table or if the number of protected
// values differs from the number of protected levels.
template <class Bits>
void values_of_levels(std::span<const std::uint8_t> levels, std::span<const Bits> table,
                      std::span<const std::uint16_t> protected_values, std::span<Bits> out);

}  // namespace dynaquant
