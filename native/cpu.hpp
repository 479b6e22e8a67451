// Marks functions that are compiled for AVX2 or AVX-512, and says which of them this processor can run. Only marked
// functions may use these instructions, so that the library runs on every processor.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define DYNAQUANT_X86
#define DYNAQUANT_AVX2 __attribute__((target("avx2,popcnt")))
#define DYNAQUANT_AVX512 __attribute__((target("avx2,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi")))
#include <immintrin.h>
#else
#define DYNAQUANT_AVX2
#endif

namespace dynaquant {

// Sets of instructions. Each includes those before it.
enum class Instructions : int { plain, avx2, avx512 };

// The most that the processor has.
Instructions supported_instructions();

// What functions may use: what the processor has, unless limit_instructions allows less.
Instructions allowed_instructions();

// For tests, which compare the functions for each set. Throws std::invalid_argument if the processor has not got it.
void limit_instructions(Instructions most);

inline bool has_avx2() { return allowed_instructions() >= Instructions::avx2; }
inline bool has_avx512() { return allowed_instructions() >= Instructions::avx512; }

}  // namespace dynaquant
