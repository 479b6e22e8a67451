// The table of a conditional coder: for each parent level, the levels sorted by their distance.
#include "nearest.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "tables.hpp"

namespace dynaquant {

namespace {

constexpr std::size_t row_size = 256;

// Sorts the levels by their distance from a source. From one source to the next on the line, few levels change places,
// so insertion sort is fast.
class Nearest {
  public:
    explicit Nearest(std::span<const double> positions) : positions_(positions), distances_(positions.size()) {
        for (std::size_t level = 0; level < positions.size(); ++level)
            if (level != level_protected) order_.push_back(static_cast<std::uint8_t>(level));
    }

    const std::vector<std::uint8_t>& to(double source) {
        for (std::size_t level = 0; level < positions_.size(); ++level)
            distances_[level] = std::abs(positions_[level] - source);
        for (std::size_t i = 1; i < order_.size(); ++i) {
            const std::uint8_t level = order_[i];
            std::size_t place = i;
            for (; place > 0 && nearer(level, order_[place - 1]); --place) order_[place] = order_[place - 1];
            order_[place] = level;
        }
        return order_;
    }

  private:
    bool nearer(std::uint8_t a, std::uint8_t b) const {
        if (distances_[a] != distances_[b]) return distances_[a] < distances_[b];
        const double from_zero = std::abs(positions_[a]), other = std::abs(positions_[b]);
        return from_zero != other ? from_zero < other : a < b;
    }

    std::span<const double> positions_;
    std::vector<double> distances_;
    std::vector<std::uint8_t> order_;
};

void check(std::span<const double> positions, std::span<const double> sources) {
    if (positions.size() < 2 || positions.size() > row_size || sources.empty() || sources.size() > row_size)
        throw std::invalid_argument("there are too few or too many levels");
    const auto is_number = [](double position) { return std::isfinite(position); };
    if (!std::all_of(positions.begin(), positions.end(), is_number) ||
        !std::all_of(sources.begin(), sources.end(), is_number))
        throw std::invalid_argument("a level lies nowhere");
}

}  // namespace

void nearest_levels(std::span<const double> positions, std::span<const double> sources, bool is_parent,
                    std::span<std::uint8_t, 65536> level_of) {
    check(positions, sources);
    std::fill(level_of.begin(), level_of.end(), std::uint8_t{0});
    std::vector<std::size_t> along(sources.size());
    std::iota(along.begin(), along.end(), std::size_t{0});
    std::stable_sort(along.begin(), along.end(),
                     [&](std::size_t a, std::size_t b) { return sources[a] < sources[b]; });
    Nearest nearest(positions);
    for (const std::size_t source : along) {
        const auto row = level_of.subspan(source * row_size, positions.size());
        // A value that was protected before probably is again. Other values rarely become protected.
        const bool first = is_parent && source == level_protected;
        row[first ? 0 : row.size() - 1] = level_protected;
        const auto& sorted = nearest.to(sources[source]);
        std::copy(sorted.begin(), sorted.end(), row.begin() + (first ? 1 : 0));
    }
    for (std::size_t source = sources.size(); source < row_size; ++source) {
        const auto row = level_of.subspan(source * row_size, positions.size());
        std::iota(row.begin(), row.end(), std::uint8_t{0});
    }
}

void symbols_of_levels(std::span<const std::uint8_t, 65536> level_of, std::size_t symbols,
                       std::span<std::uint8_t, 65536> symbol_of) {
    if (symbols > row_size) throw std::invalid_argument("there are too many symbols");
    std::fill(symbol_of.begin(), symbol_of.end(), std::uint8_t{0});
    for (std::size_t row = 0; row < symbol_of.size(); row += row_size)
        for (std::size_t symbol = 0; symbol < symbols; ++symbol)
            symbol_of[row + level_of[row + symbol]] = static_cast<std::uint8_t>(symbol);
}

}  // namespace dynaquant
