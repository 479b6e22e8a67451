// Marks functions that are compiled for AVX2 or AVX-512, and says which of them this processor can run. Only marked
// functions may use these instructions, so that the library runs on every processor. Every ARM processor of 64 bits has
// NEON, so its functions need no mark.
#pragma once

#include <array>

#if defined(__x86_64__) && defined(__GNUC__)
#define DYNAQUANT_X86
#define DYNAQUANT_AVX2 __attribute__((target("avx2,popcnt")))
#define DYNAQUANT_AVX512 __attribute__((target("avx2,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")))
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__) && !defined(__AARCH64EB__)
#define DYNAQUANT_NEON
#include <arm_neon.h>
#endif
// Marks lambdas that with_widest compiles.
#define DYNAQUANT_INLINED __attribute__((always_inline))

namespace dynaquant {

// Sets of instructions that this kind of processor may have. Each includes those before it.
#ifdef DYNAQUANT_NEON
enum class Instructions : int { plain, neon };
inline constexpr std::array instruction_names = {"plain", "neon"};
#else
enum class Instructions : int { plain, avx2, avx512 };
inline constexpr std::array instruction_names = {"plain", "avx2", "avx512"};
#endif

// The most that the processor has.
Instructions supported_instructions();

// What functions may use: what the processor has, unless limit_instructions allows less.
Instructions allowed_instructions();

// For tests, which compare the functions for each set. Throws std::invalid_argument if the processor has not got it.
void limit_instructions(Instructions most);

#ifdef DYNAQUANT_NEON
inline bool has_neon() { return allowed_instructions() >= Instructions::neon; }
#else
inline bool has_avx2() { return allowed_instructions() >= Instructions::avx2; }
inline bool has_avx512() { return allowed_instructions() >= Instructions::avx512; }
#endif

#ifdef DYNAQUANT_X86
template <class Work>
DYNAQUANT_AVX2 auto with_avx2(const Work& work) {
    return work();
}
template <class Work>
DYNAQUANT_AVX512 auto with_avx512(const Work& work) {
    return work();
}
#endif

// Returns work(), with the widest vectors that it may use: it is compiled once for each set of instructions. So it must
// be marked DYNAQUANT_INLINED, and the functions with its loops always be inlined.
template <class Work>
auto with_widest(const Work& work) {
#ifdef DYNAQUANT_X86
    if (has_avx512()) return with_avx512(work);
    if (has_avx2()) return with_avx2(work);
#endif
    return work();
}

}  // namespace dynaquant
