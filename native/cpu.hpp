// Functions that use AVX2 where the processor has it. They are marked one by one: no other code may come to need it.
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
