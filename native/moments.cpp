// How much a sample of stored moments changes updates.
#include "moments.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu.hpp"
#include "roots.hpp"

namespace dynaquant {
namespace {

constexpr std::size_t lanes = 16;  // independent sums: enough for compilers to vectorise
constexpr float infinity = std::numeric_limits<float>::infinity();

double sum_of(const std::array<double, lanes>& parts) {
    double sum = 0.0;
    for (const double part : parts) sum += part;
    return sum;
}

[[gnu::always_inline]] inline RootChanges changes(std::span<const float> values, const float* decoded) {
    std::array<double, lanes> squares{};
    std::array<std::size_t, lanes> counts{}, unusable{};
    const auto add = [&](std::size_t i, std::size_t lane) {
        const bool counted = values[i] > 0.0f;
        const double change = std::sqrt(static_cast<double>(values[i] / decoded[i])) - 1.0;
        squares[lane] += counted ? change * change : 0.0;
        counts[lane] += counted;
        unusable[lane] += counted && !(decoded[i] > 0.0f && decoded[i] < infinity);
    };
    const std::size_t whole = values.size() / lanes * lanes;
    for (std::size_t i = 0; i < whole; i += lanes)
        for (std::size_t lane = 0; lane < lanes; ++lane) add(i + lane, lane);
    for (std::size_t i = whole; i < values.size(); ++i) add(i, i - whole);
    RootChanges found;
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        found.count += counts[lane];
        found.unusable = found.unusable || unusable[lane] != 0;
    }
    found.squares = found.unusable ? 0.0 : sum_of(squares);
    return found;
}

RootChanges changes_plain(std::span<const float> values, const float* decoded) { return changes(values, decoded); }
DYNAQUANT_AVX2 RootChanges changes_avx2(std::span<const float> values, const float* decoded) {
    return changes(values, decoded);
}

// Sets the weights of a value's update in the sums of a fit, and returns the sums of the updates themselves.
[[gnu::always_inline]] inline Updates weigh(std::span<const float> firsts, const float* seconds, double epsilon,
                                            double* products, double* factors) {
    std::array<double, lanes> squares{};
    std::array<float, lanes> largest{};
    const auto add = [&](std::size_t i, std::size_t lane) {
        const double root = std::sqrt(static_cast<double>(seconds[i])), divisor = root + epsilon;
        const double update = static_cast<double>(firsts[i]) / divisor, factor = root / divisor;
        products[i] = update * factor;
        factors[i] = factor * factor;
        squares[lane] += update * update;
        largest[lane] = std::max(largest[lane], std::abs(firsts[i]));
    };
    const std::size_t whole = firsts.size() / lanes * lanes;
    for (std::size_t i = 0; i < whole; i += lanes)
        for (std::size_t lane = 0; lane < lanes; ++lane) add(i + lane, lane);
    for (std::size_t i = whole; i < firsts.size(); ++i) add(i, i - whole);
    return {sum_of(squares), *std::max_element(largest.begin(), largest.end())};
}

Updates weigh_plain(std::span<const float> firsts, const float* seconds, double epsilon, double* products,
                    double* factors) {
    return weigh(firsts, seconds, epsilon, products, factors);
}
DYNAQUANT_AVX2 Updates weigh_avx2(std::span<const float> firsts, const float* seconds, double epsilon,
                                  double* products, double* factors) {
    return weigh(firsts, seconds, epsilon, products, factors);
}

}  // namespace

RootChanges root_changes(std::span<const float> values, std::span<const float> decoded) {
    return (has_avx2() ? changes_avx2 : changes_plain)(values, decoded.data());
}

Updates update_fits(std::span<const float> firsts, std::span<const float> seconds, double epsilon,
                    std::span<const float> inverses, std::span<GridFit> fits) {
    std::vector<float> units(firsts.size());
    std::vector<double> products(firsts.size()), factors(firsts.size());
    const Updates found = (has_avx2() ? weigh_avx2 : weigh_plain)(firsts, seconds.data(), epsilon, products.data(),
                                                                  factors.data());
    divide_by_roots(firsts, seconds, units);
    grid_fits(units, products, factors, inverses, fits);
    return found;
}

}  // namespace dynaquant
