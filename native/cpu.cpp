// Which instructions this processor has, and which of them may be used.
#include "cpu.hpp"

#include <atomic>
#include <stdexcept>

namespace dynaquant {
namespace {

std::atomic<Instructions>& allowed() {
    static std::atomic<Instructions> most = supported_instructions();
    return most;
}

}  // namespace

Instructions supported_instructions() {
#ifdef DYNAQUANT_X86
    static const Instructions most = [] {
        if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("popcnt")) return Instructions::plain;
        const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512vbmi");
        return wide ? Instructions::avx512 : Instructions::avx2;
    }();
    return most;
#elif defined(DYNAQUANT_NEON)
    return Instructions::neon;
#else
    return Instructions::plain;
#endif
}

Instructions allowed_instructions() { return allowed().load(std::memory_order_relaxed); }

void limit_instructions(Instructions most) {
    if (most > supported_instructions()) throw std::invalid_argument("this processor has no such instructions");
    allowed().store(most, std::memory_order_relaxed);
}

}  // namespace dynaquant
