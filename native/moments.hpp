// How much a sample of stored moments changes updates. Sums are the same on every machine.
#pragma once

#include <cstddef>
#include <span>

#include "grid.hpp"

namespace dynaquant {

// How decoded second moments change 1 / sqrt(v), over the values that are not zero. If a decoded value of these is zero
// or infinite, the sum counts for nothing.
struct RootChanges {
    bool unusable = false;
    double squares = 0.0;  // Σ (sqrt(v / decoded) - 1)²
    std::size_t count = 0;
};

// decoded: as many as values.
RootChanges root_changes(std::span<const float> values, std::span<const float> decoded);

struct Updates {
    double squares = 0.0;  // Σ update²
    float largest = 0.0f;  // the largest magnitude of a first moment
};

// Sets fits[k] for first moments in units of the roots of their second moments, on the grid with step 1 / inverses[k],
// weighted as the updates m / (sqrt(v) + epsilon) are. seconds: as many as firsts; zero only where those are.
Updates update_fits(std::span<const float> firsts, std::span<const float> seconds, double epsilon,
                    std::span<const float> inverses, std::span<GridFit> fits);

}  // namespace dynaquant
