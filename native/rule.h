// How neighbours are drawn, shared by the C library and the CUDA kernels; sampler.py explains it and
// has it as torch operations, tests/test_sampler.py in plain Python. In rules/ are the rules, which
// choose edges of a list; the cuts, after which a list has only edges that its node may see; and the
// split of a list by type. One rule is compiled, "@rule". ID is the type of node ids, WEIGHT of edge
// weights and TYPE of edge types, if there are any.
#include "base.h"

enum { UNIFORM, REPLACE, LATEST };  // rules of positions.h

// 32 random bits: draw `number` of node v.
FN u64 draw(u64 key, u64 v, u64 number) { return mix(mix(key ^ v) ^ number) >> 32; }
// Uniform in 0 .. bound - 1, from 32 random bits.
FN i64 below(u64 bits, i64 bound) { return (i64)(bits * (u64)bound >> 32); }

// The graph, and how to draw from it: one for all hops and batches of a sampler.
typedef struct {
  const i64 *indptr;
  const ID *indices;
  const void *column;     // [M] of the rule; null: it needs none
  const void *types;      // TYPE [M] ascending in each list; null: edges have none
  const i64 *fanouts;     // [L, NUM_TYPES] k of each hop and type, NO_TYPE: no such type
  const i64 *edge_times;  // [M] ascending in each list or, with types, within a type; null: none
  i64 rule, strict, window;  // rule: which of positions.h; for the others see `cut_by_time`
  i64 V, M;                  // bounds of the ids and offsets read from the graph
} spec_t;
enum { NO_TYPE = -2 };

// A hop: how many edges to draw from each list, and by which random key; if neighbourhoods are
// disjoint, this is mix(key ^ seed) in that of a seed.
typedef struct {
  i64 index, k;  // counted from the seeds; k -1: all
  u64 key;
} hop_t;

typedef struct {      // the part of a node's list that may be sampled
  i64 start, degree;  // where it begins; number of edges (with the excluded before `next_type`)
  const i64 *gaps;    // its excluded edges, ascending
  i64 num_gaps;
  i64 time;  // of the node, for lists by type
} row_t;

// Raise `low` by how many of n places from there on, in order, satisfy `early`, an expression in `at`.
#define BISECT(low, n, early)                   \
  for (i64 left = n; left;) {                   \
    i64 half = left / 2, at = low + half;       \
    i64 more = early;                           \
    low += more ? half + 1 : 0;                 \
    left = more ? left - half - 1 : half;       \
  }
// How many of n sorted numbers are < value.
FN i64 lower_bound(const i64 *sorted, i64 n, i64 value) {
  i64 low = 0;
  BISECT(low, n, sorted[at] < value)
  return low;
}

// Floyd's algorithm (CACM 30(9), 1987) for n rows at a time, which the compiler vectorizes: draw i of
// a row, whose mix(key ^ v) is its hash, is picks[i * stride + row]. Every degree is above k. A pick
// that is taken already, -1 for a while, becomes the last of its range, which is free.
#define FLOYD(name, number)                                                                      \
  FN void name(i64 n, i64 k, const u64 *hash, const number *degree, number *picks, i64 stride) { \
    for (i64 i = 0; i < k; i++) {                                                                \
      number *__restrict__ pick = picks + i * stride;                                            \
      const number beyond = (number)(i - k);                                                     \
      for (i64 row = 0; row < n; row++) {                                                        \
        u64 bits = mix(hash[row] ^ (u64)i) >> 32;                                                \
        pick[row] = (number)below(bits, (number)(degree[row] + beyond + 1));                     \
      }                                                                                          \
      for (i64 earlier = 0; earlier < i; earlier++) {                                            \
        const number *__restrict__ other = picks + earlier * stride;                             \
        for (i64 row = 0; row < n; row++) pick[row] |= -(number)(other[row] == pick[row]);       \
      }                                                                                          \
      for (i64 row = 0; row < n; row++)                                                          \
        pick[row] = ~pick[row] ? pick[row] : degree[row] + beyond;                               \
    }                                                                                            \
  }

#include "rules/times.h"
#include "rules/exclude.h"
// count_list(): how many edges of a list will be picked; pick_list() writes these n positions in the
// graph's indices to out. POSITIONS: whether the rule is of positions.h. FETCH_LIST(spec, start)
// prefetches what the rule reads of each edge from `start` on.
#include "@rule"
// count_row(), pick_row(): the same for all lists of a node.
#include "rules/types.h"
