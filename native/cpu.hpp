// Marks functions that are compiled for AVX2, and detects whether the processor has it. Only marked functions may use
// AVX2, so that the library runs on every processor.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define DYNAQUANT_X86
#define DYNAQUANT_AVX2 __attribute__((target("avx2,popcnt")))
#include <immintrin.h>
#else
#define DYNAQUANT_AVX2
#endif

namespace dynaquant {

inline bool has_avx2() {
#ifdef DYNAQUANT_X86
    static const bool has = __builtin_cpu_supports("avx2") != 0;
    return has;
#else
    return false;
#endif
}

}  // namespace dynaquant
