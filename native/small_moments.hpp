// Moments of small tensors that one process holds as a whole, each in one call: the decisions of
// engine/quantize/first_moment.py and second_moment.py, from the same functions. A checkpoint of a thousand small tensors
// takes as long as the calls for them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>

#include "moments.hpp"

namespace dynaquant {

// Levels of a second moment on one of the grids.
struct OnLogGrid {
    int pace;
    LogBins bins;
};

using SecondMomentForm = std::variant<std::monostate, RankOneBins, OnLogGrid>;

// Returns the cheapest form that changes 1 / sqrt(v) by at most the tolerance, of_rank_one for rows and columns (0: they are
// not tried), and sets its levels: either rows and columns, or levels. None: it is not finite, has negative values, or no
// form is good enough. values: not empty, row by row; as many levels. negligible: of root_changes. rows: empty if it is no matrix. paces: of the grids to try, coarsest
// first.
SecondMomentForm small_second_moment(std::span<const float> values, double tolerance, double of_rank_one, float negligible,
                                     Positions positions, std::span<const int> paces, std::span<std::uint8_t> rows,
                                     std::span<std::uint8_t> columns, std::span<std::uint8_t> levels);

// A decoded factor of a second moment: levels of powers of 2^(pace/4) from an exponent on.
struct Powers {
    std::span<const std::uint8_t> levels;
    int pace, first;
};

struct SmallFirstMoment {
    MomentGrid grid;
    std::uint32_t highest;  // level; 256 if a value is protected
};

// Returns the coarsest first moment that changes the next update by at most the tolerance, and sets its levels, in units
// of the root of the second moment. None: it is not finite, a value of more than `zero` is divided by zero, or no grid is
// good enough. second: rows and columns, or all values and nothing. rungs: of the steps to try. epsilon: of update_fits.
std::optional<SmallFirstMoment> small_first_moment(std::span<const float> values, const Powers& second,
                                                   const std::optional<Powers>& columns, double tolerance,
                                                   double epsilon, float zero, std::span<const std::int32_t> rungs,
                                                   std::span<const float> inverses, std::span<std::uint8_t> levels);

}  // namespace dynaquant
