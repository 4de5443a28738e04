// Shared by all C and CUDA sources here: integer types, splitmix64, bfloat16, and the macros of
// CUDA kernels, which a C compiler takes too.
//
// A kernel is written `KERNEL name(type argument, ...)` at the start of a line, where build.py
// reads the types of its arguments. It runs in blocks of 256 threads, the last of which may be
// partly idle: `THREAD(n);` sets i to the thread's number and ends the threads from n on. For a C
// compiler a kernel is a function whose threads may run one after another, in any order. With HOST
// each is a part of a row, whose numbers it gets as row_ and part_; torch's OpenMP threads take the
// rows as they become idle (build.py: load_host). Without, the including file provides blockIdx,
// blockDim, threadIdx and atomicMin.
#ifndef BASE_H
#define BASE_H
typedef unsigned long long u64;
typedef long long i64;

#ifdef __CUDACC__
#define KERNEL extern "C" __global__ void __launch_bounds__(256)
#define FN static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ONE_BY_ONE _Pragma("unroll 1")
#define BY_TWO _Pragma("unroll 2")
#define FAIL __trap()
// Threads of a warp, of which no thread may be missing: the number of one, the sum of what all have and of
// what those before have, and their votes, a bit each. A C compiler, which runs threads one after another,
// has warps of one thread, whose vote is bit `at`.
#define WARP 32
#define LANE ((int)threadIdx.x % WARP)
template <class T> FN T sum_of_warp(T x) {
  UNROLL for (int by = WARP / 2; by; by /= 2) x += __shfl_xor_sync(~0u, x, by);
  return x;
}
FN i64 before_in_warp(i64 x) {
  i64 sum = x;
  UNROLL for (int by = 1; by < WARP; by *= 2) {
    const i64 other = __shfl_up_sync(~0u, sum, by);
    sum += LANE < by ? 0 : other;
  }
  return sum - x;
}
#define votes(yes, at) __ballot_sync(~0u, yes)
// Store a value where other threads may store the same one.
template <class T> FN void store_same(T *p, T value) { *(volatile T *)p = value; }
#else
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef HOST
#define KERNEL static inline void
#define UNROLL _Pragma("GCC unroll 16")
#else
#define KERNEL void
#define UNROLL
#endif
#define ONE_BY_ONE
#define BY_TWO
#define min(a, b) ((a) < (b) ? (a) : (b))
#define FN static inline
#define FAIL abort()
#define store_same(p, value) __atomic_store_n(p, value, 0)
#define __popc __builtin_popcount
#define __fadd_rn(a, b) ((a) + (b))
#define atomicAdd __sync_fetch_and_add
#define atomicOr __sync_fetch_and_or
#define atomicCAS __sync_val_compare_and_swap
#ifndef WARP
#define WARP 1
#define LANE 0
#define sum_of_warp(x) (x)
#define before_in_warp(x) 0
#define votes(yes, at) ((unsigned)(yes) << (at))
#endif
#endif
#define ALIGN(n) __attribute__((aligned(n)))
#ifdef HOST
#define THREAD(n) const i64 i = row_
#else
#define THREAD(n)                                     \
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; \
  if (i >= (n)) return
#endif

// ---- splitmix64 (Steele, Lea, Flood, OOPSLA 2014)

#define GOLDEN 0x9e3779b97f4a7c15ULL
FN u64 finalise(u64 z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}
FN u64 mix(u64 z) { return finalise(z + GOLDEN); }

// ---- conversion of table values, float, bf16 or codes of 8 bits, to float and back: UP(IN)(x), DOWN(OUT)(x)

typedef signed char int8;
typedef struct {
  unsigned short bits;
} bf16;
typedef union {
  unsigned bits;
  float number;
} both_t;
FN float up_float(float x) { return x; }
FN float up_int8(int8 x) { return x; }
FN float up_bf16(bf16 x) {
  both_t u = {(unsigned)x.bits << 16};
  return u.number;
}
FN float down_float(float x) { return x; }
FN int8 down_int8(float x) { return (int8)x; }  // for kernels that codes do not reach
FN bf16 down_bf16(float x) {  // to nearest, ties to even
  bf16 y;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  both_t u;
  u.number = x;
  if (x != x) u.bits = 0x7fc00000;  // the sum could wrap around for a NaN, as for CUDA's
  y.bits = (unsigned short)((u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16);
#endif
  return y;
}
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define UP(type) JOIN(up, type)
#define DOWN(type) JOIN(down, type)
#endif
