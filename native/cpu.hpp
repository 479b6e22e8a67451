// Functions that use AVX2 where the processor has it. They are marked one by one: no other code may come to need it.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define DYNAQUANT_AVX2 __attribute__((target("avx2,popcnt")))

namespace dynaquant {

inline bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2") != 0;
    return has;
}

}  // namespace dynaquant
#endif
