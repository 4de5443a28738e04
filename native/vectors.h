// Adjacent columns of a row as one vector, of the C compiler's type or, for NVRTC, of a struct with the
// same operators: rows of type IN are read, results of type OUT (float or bf16) written, sums are float.
#include "base.h"

// A thread has COLUMNS adjacent columns of a row as one vector, of the C compiler's type or, for
// NVRTC, of a struct with the same operators. It is loaded and stored at once on a GPU if rows are
// aligned (`whole`), on the host if the row has that many columns `left`; otherwise one by one.
// Kernels with a `width`, and no others, have consecutive threads for a row: see ROW_AND_COLUMN; those of
// norm.cu have a warp.
#ifdef HOST
#ifdef __AVX512F__  // floats in a vector register
#define COLUMNS 16
#elif defined __AVX__
#define COLUMNS 8
#else
#define COLUMNS 4
#endif
#define WIDE(bytes) aligned(1), may_alias
#define AT_ONCE (left >= COLUMNS)
#define GROUP 1
#define kept_t IN  // the result of ReLU and dropout
#define KEEP_BITS(row, v) (void)0
#define WHERE_KEPT(row) (load(kept + (i64)(row) * width + column, whole, left) > 0.0f)
#define PAIR_WAS_KEPT WHERE_KEPT
#define PARTS 0
#define ROW_AND_COLUMN(rows) \
  const i64 row = row_;      \
  const int column = part_ * COLUMNS, left = width - column
#else
#define COLUMNS 4
#define WIDE(bytes) aligned(bytes)
#define AT_ONCE whole
#define GROUP 8  // rows that a thread loads at a time
#define PAIR_GROUP 4  // the same in self_and_mean, where a thread has twice the columns
typedef unsigned char kept_t;  // a bit for each of COLUMNS columns: whether it is above 0
#define KEPT(row) kept[(i64)(row) * parts + column / COLUMNS]
#define KEEP_BITS(row, v) \
  if (kept) store_same(&KEPT(row), bits_above_zero(v))
#define WHERE_KEPT(row) where_kept(KEPT(row))
// The same where a byte has the bits of a pair of vectors.
#define KEPT_PAIR(row) kept[(i64)(row) * ((parts + 1) / 2) + column / (2 * COLUMNS)]
#define KEEP_PAIR(row, v) \
  if (kept) store_same(&KEPT_PAIR(row), \
                       (kept_t)(bits_above_zero(v.x[0]) | bits_above_zero(v.x[1]) << COLUMNS))
#define PAIR_WAS_KEPT(row) where_kept((kept_t)(KEPT_PAIR(row) >> column % (2 * COLUMNS)))
#define PARTS parts
#define ROW_AND_COLUMN(rows)                                        \
  const unsigned parts = (unsigned)(width + COLUMNS - 1) / COLUMNS; \
  THREAD((i64)(rows) * parts);                                      \
  const i64 row = (unsigned)i / parts;                              \
  const int column = (int)((unsigned)i % parts * COLUMNS), left = width - column
#endif
#define EACH UNROLL for (int q = 0; q < COLUMNS; q++)
#define EACH_LEFT EACH if (!q || q < left)
#ifdef __CUDACC__
template <class T> struct ALIGN(4 * sizeof(T)) vector_t {
  T x[COLUMNS];
  __device__ T &operator[](int q) { return x[q]; }
  __device__ T operator[](int q) const { return x[q]; }
};
typedef vector_t<float> floats_t, wide_t;
typedef vector_t<int> ints_t, wide_ints_t;
#define OPERATOR(result, first, operation, second, a, b)                                 \
  static __device__ __forceinline__ result operator operation(first left, second right) { \
    result made;                                                                          \
    EACH made[q] = left a operation right b;                                              \
    return made;                                                                          \
  }
OPERATOR(floats_t, floats_t, +, floats_t, [q], [q])
OPERATOR(floats_t, floats_t, *, floats_t, [q], [q])
OPERATOR(floats_t, floats_t, *, float, [q], )
OPERATOR(ints_t, floats_t, >, floats_t, [q], [q])
OPERATOR(ints_t, floats_t, >, float, [q], )
OPERATOR(ints_t, floats_t, <, float, [q], )
OPERATOR(ints_t, ints_t, <, int, [q], )
OPERATOR(ints_t, ints_t, ==, int, [q], )
OPERATOR(ints_t, ints_t, |, ints_t, [q], [q])
OPERATOR(ints_t, ints_t, &, int, [q], )
template <class T> __device__ __forceinline__ T choose(ints_t where, T yes, T no) {
  EACH if (where[q]) no[q] = yes[q];
  return no;
}
#else
typedef float floats_t __attribute__((vector_size(4 * COLUMNS)));
typedef int ints_t __attribute__((vector_size(4 * COLUMNS)));
typedef float wide_t __attribute__((vector_size(4 * COLUMNS), WIDE(16)));
typedef int wide_ints_t __attribute__((vector_size(4 * COLUMNS), WIDE(16)));
#define choose(where, yes, no) \
  ((__typeof__(no))(((where) & (ints_t)(yes)) | (~(where) & (ints_t)(no))))
#endif
typedef struct __attribute__((WIDE(4 * sizeof(IN)))) {
  IN x[COLUMNS];
} in_t;
typedef struct __attribute__((WIDE(4 * sizeof(OUT)))) {
  OUT x[COLUMNS];
} out_t;

#define VECTOR(all_of, of, number, vector, wide)                  \
  FN vector all_of(number x) {                                    \
    vector v;                                                     \
    EACH v[q] = x;                                                \
    return v;                                                     \
  }                                                               \
  FN vector load_##of(const number *p, int whole, int left) {     \
    vector v = all_of(0);                                         \
    if (AT_ONCE) v = *(const wide *)p;                            \
    else EACH_LEFT v[q] = p[q];                                   \
    return v;                                                     \
  }                                                               \
  FN void store_##of(number *p, int whole, int left, vector v) {  \
    if (AT_ONCE) *(wide *)p = v;                                  \
    else EACH_LEFT p[q] = v[q];                                   \
  }
VECTOR(all_of, floats, float, floats_t, wide_t)
VECTOR(all_of_int, ints, int, ints_t, wide_ints_t)
FN floats_t load(const IN *p, int whole, int left) {
  if (sizeof(IN) == sizeof(float)) return load_floats((const float *)p, whole, left);
#ifdef HOST  // by doubling widths: compilers convert the loop below, and codes to ints, number by number
  typedef int8 codes_t __attribute__((vector_size(COLUMNS), WIDE(1)));
  typedef short shorts_t __attribute__((vector_size(2 * COLUMNS)));
  if (sizeof(IN) == 1 && AT_ONCE) {
    const shorts_t codes = __builtin_convertvector(*(const codes_t *)p, shorts_t);
    return __builtin_convertvector(__builtin_convertvector(codes, ints_t), floats_t);
  }
#endif
  floats_t v = all_of(0);
  if (AT_ONCE) {
    in_t row = *(const in_t *)p;
    EACH v[q] = UP(IN)(row.x[q]);
  } else EACH_LEFT v[q] = UP(IN)(p[q]);
  return v;
}
FN void store(OUT *p, int whole, int left, floats_t v) {
  if (sizeof(OUT) == sizeof(float)) {
    store_floats((float *)p, whole, left, v);
  } else if (AT_ONCE) {
    out_t row;
    EACH row.x[q] = DOWN(OUT)(v[q]);
    *(out_t *)p = row;
  } else EACH_LEFT p[q] = DOWN(OUT)(v[q]);
}
#if defined HOST && defined __x86_64__  // a compiler cannot see that it could add with one rounding
#define KEEP_PRODUCT(v) __asm__("" : "+x"(v))
#elif defined HOST && defined __aarch64__
#define KEEP_PRODUCT(v) __asm__("" : "+w"(v))
#elif defined HOST
#define KEEP_PRODUCT(v)
#endif
// What codes of 8 bits stand for: times the steps [2, width] of their columns, plus the offsets in the
// second row. Rounded twice, as by torch: __fadd_rn becomes no FMA.
FN floats_t decode(floats_t v, const float *steps, int width, int whole, int left) {
  const floats_t offset = load_floats(steps + width, whole, left);
  v = v * load_floats(steps, whole, left);
#ifdef HOST
  KEEP_PRODUCT(v);
  v = v + offset;
#else
  EACH v[q] = __fadd_rn(v[q], offset[q]);
#endif
  return v;
}
FN float total(floats_t v) {
  for (int half = COLUMNS / 2; half; half /= 2)
    for (int q = 0; q < half; q++) v[q] += v[q + half];
  return v[0];
}
FN floats_t leaky(floats_t z) { return choose(z > 0.0f, z, z * 0.2f); }
// Slopes of `width` columns, a bit each: a thread's columns are the same bit of COLUMNS words.
#define SLOPE_WORD(column) ((column) / (32 * COLUMNS) * COLUMNS)
#define SLOPE_WORDS(width) SLOPE_WORD((width) + 32 * COLUMNS - 1)
#define SLOPE_BIT(column) ((int)(1u << (column) / COLUMNS % 32))
// Backward of ReLU and dropout: g * scale `where` their result was above 0, else 0.
FN floats_t keep(ints_t where, floats_t g, float scale) {
  return choose(where, g * scale, all_of(0));
}
FN unsigned char bits_above_zero(floats_t v) {
  unsigned bits = 0;
  EACH bits |= (unsigned)(v[q] > 0.0f) << q;
  return (unsigned char)bits;
}
FN ints_t where_kept(unsigned char bits) {
  ints_t where;
  EACH where[q] = -(bits >> q & 1);
  return where;
}
