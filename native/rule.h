// The sampling rule, shared by the C library and the CUDA kernels; sampler.py explains it and has
// it as torch operations, tests/test_sampler.py in plain Python. ID is the type of node ids, WEIGHT
// of edge weights and TYPE of edge types, if there are any.
#include "base.h"

enum { UNIFORM, REPLACE, LATEST, LABOR, WEIGHTED };

// 32 random bits: draw `number` of node v.
FN u64 draw(u64 key, u64 v, u64 number) { return mix(mix(key ^ v) ^ number) >> 32; }
// Uniform in 0 .. bound - 1, from 32 random bits.
FN i64 below(u64 bits, i64 bound) { return (i64)(bits * (u64)bound >> 32); }

// The graph, and how to draw from it: one for all hops and batches of a sampler.
typedef struct {
  const i64 *indptr;
  const ID *indices;
  const WEIGHT *weights;
  const void *types;      // TYPE [M] ascending in each list; null: edges have none
  const i64 *fanouts;     // [L, NUM_TYPES] k of each hop and type, NO_TYPE: no such type
  const i64 *edge_times;  // [M] ascending in each list or, with types, within a type; null: none
  i64 rule, strict, window;  // for the last two see `cut_by_time`
  i64 V, M;                  // bounds of the ids and offsets read from the graph
} law_t;
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

// How many of n sorted numbers are < value.
#define LOWER_BOUND(name, number)                                \
  FN i64 name(const number *sorted, i64 n, i64 value) {          \
    i64 low = 0;                                                 \
    while (n) {                                                  \
      i64 half = n / 2, smaller = sorted[low + half] < value;    \
      low += smaller ? half + 1 : 0;                             \
      n = smaller ? n - half - 1 : half;                         \
    }                                                            \
    return low;                                                  \
  }
LOWER_BOUND(lower_bound, i64)
// How many of the sorted times are <= time or, if strict, < time.
FN i64 number_before(const i64 *times, i64 n, i64 time, int strict) {
  i64 none_later = (i64)(~0ULL >> 1);
  if (strict) return lower_bound(times, n, time);
  return time == none_later ? n : lower_bound(times, n, time + 1);
}
// Cut a row to the edges whose time is > `time` - window, if there is a window.
FN void cut_by_window(row_t *row, const law_t *law, i64 time) {
  i64 since = (i64)((u64)time - (u64)law->window);
  if (!law->window || since > time) return;  // since > time: it wrapped around, all are later
  i64 early = number_before(law->edge_times + row->start, row->degree, since, 0);
  row->start += early;
  row->degree -= early;
}
// Cut a row to the edges whose time is <= `time` or, if strict, < `time`, and by the window.
FN void cut_by_time(row_t *row, const law_t *law, i64 time) {
  const i64 *times = law->edge_times + row->start;
  row->degree = number_before(times, row->degree, time, (int)law->strict);
  cut_by_window(row, law, time);
}
// Exclude from a row those of the sorted edge ids that are in it.
FN void exclude(row_t *row, const i64 *edges, i64 n) {
  i64 before = lower_bound(edges, n, row->start);
  row->gaps = edges + before;
  row->num_gaps = lower_bound(row->gaps, n - before, row->start + row->degree);
  row->degree -= row->num_gaps;
}
// The edge at a place of a row, counted without the excluded edges.
FN i64 edge_at(const row_t *row, i64 place) {
  // Count the excluded edges before it: those with gaps[g] - g <= start + place.
  i64 low = 0, n = row->num_gaps;
  while (n) {
    i64 half = n / 2, before = row->gaps[low + half] - (low + half) <= row->start + place;
    low += before ? half + 1 : 0;
    n = before ? n - half - 1 : half;
  }
  return row->start + place + low;
}
// The first edge from `edge` on that is not excluded; moves `gap` past those that are.
FN i64 not_excluded(const row_t *row, i64 edge, i64 *gap) {
  for (; *gap < row->num_gaps && row->gaps[*gap] == edge; ++*gap) edge++;
  return edge;
}

FN int labor_keeps(const law_t *law, const hop_t *hop, i64 edge, i64 degree) {
  u64 limit = (u64)hop->k << 32;
  return hop->k < 0 || draw(hop->key, (u64)law->indices[edge], 0) * (u64)degree <= limit;
}

// How many edges of a list will be picked.
FN i64 count_list(const law_t *law, const hop_t *hop, const row_t *row) {
  i64 count = 0, gap = 0, edge = row->start, degree = row->degree;
  if (law->rule == REPLACE) return degree ? hop->k : 0;
  if (law->rule != LABOR && law->rule != WEIGHTED) count = degree;
  else
    for (i64 place = 0; place < degree; place++, edge++) {
      edge = not_excluded(row, edge, &gap);
      if (law->rule == LABOR) count += labor_keeps(law, hop, edge, degree);
      else if ((count += law->weights[edge] > 0) == hop->k) break;  // more would not matter
    }
  return law->rule == LABOR || hop->k < 0 || count < hop->k ? count : hop->k;
}

// The n edges with the largest log(uniform) / weight (Efraimidis-Spirakis), in stored order; best
// [n] is scratch. The best so far are kept sorted, which for usual fanouts is cheaper than a heap;
// of equal keys the earlier edge wins.
FN void pick_heaviest(const law_t *law, const hop_t *hop, u64 v, const row_t *row, i64 n, i64 *out,
                      double *best) {
  i64 found = 0, gap = 0, edge = row->start;
  int all = hop->k < 0 || n < hop->k;
  for (i64 place = 0; place < row->degree; place++, edge++) {
    edge = not_excluded(row, edge, &gap);
    double weight = law->weights[edge];
    if (!(weight > 0)) continue;
    if (all) {
      out[found++] = edge;
      continue;
    }
    double uniform = ((double)draw(hop->key, v, place) + 0.5) * (1.0 / 4294967296.0);
    // log(x) < x - 1, by more than rounding: most edges need no logarithm
    if (found == n && uniform - 1 <= best[n - 1] * weight) continue;
    double key = log(uniform) / weight;
    if (found == n && !(key > best[n - 1])) continue;
    i64 at = found < n ? found++ : n - 1;
    for (; at > 0 && key > best[at - 1]; at--) {
      best[at] = best[at - 1];
      out[at] = out[at - 1];
    }
    best[at] = key;
    out[at] = edge;
  }
  for (i64 i = 1; i < n; i++) {  // back to stored order
    i64 edge = out[i], at = i;
    for (; at > 0 && out[at - 1] > edge; at--) out[at] = out[at - 1];
    out[at] = edge;
  }
}

// Write the n = count_list() chosen positions in the graph's indices to out.
FN void pick_list(const law_t *law, const hop_t *hop, u64 v, const row_t *row, i64 n, i64 *out,
                 double *best) {
  i64 degree = row->degree;
  if (law->rule == WEIGHTED) {
    pick_heaviest(law, hop, v, row, n, out, best);
    return;
  }
  if (law->rule == LABOR) {
    i64 gap = 0, edge = row->start;
    for (i64 place = 0; place < degree; place++, edge++) {
      edge = not_excluded(row, edge, &gap);
      if (labor_keeps(law, hop, edge, degree)) *out++ = edge;
    }
    return;
  }
  if (law->rule == REPLACE) {
    for (i64 i = 0; i < n; i++) out[i] = below(draw(hop->key, v, i), degree);
  } else if (law->rule == LATEST || n == degree) {
    for (i64 i = 0; i < n; i++) out[i] = degree - n + i;
  } else {  // Floyd: if the pick is taken already, the last of its range, which is free
    for (i64 i = 0; i < n; i++) {
      i64 last = degree - n + i, pick = below(draw(hop->key, v, i), last + 1), earlier = 0;
      while (earlier < i && out[earlier] != pick) earlier++;
      out[i] = earlier < i ? last : pick;
    }
  }
  for (i64 i = 0; i < n; i++) out[i] = edge_at(row, out[i]);
}

#ifndef TYPE
#define count_row count_list
#define pick_row pick_list
#else
// ---- lists by type: the edges of each type are a list of their own

#define NUM_TYPES (1 << 8 * sizeof(TYPE))

// Split the edges of the first type off `rest`, whose degree includes excluded edges and whose gaps
// are all of these -> the row to draw from; `one` is set to the hop as it is for this type.
FN row_t next_type(const law_t *law, const hop_t *hop, row_t *rest, hop_t *one) {
  const TYPE *types = (const TYPE *)law->types + rest->start;
  i64 n = 1, left = rest->degree - 1;  // the first n edges are known to have the same type
  while (left) {
    i64 half = left / 2, same = types[n + half] <= types[0];
    n += same ? half + 1 : 0;
    left = same ? left - half - 1 : half;
  }
  row_t row = {rest->start, n, 0, 0, 0};
  if (law->edge_times) cut_by_time(&row, law, rest->time);
  if (rest->num_gaps) exclude(&row, rest->gaps, rest->num_gaps);
  one->index = hop->index;
  one->k = law->fanouts[hop->index * NUM_TYPES + types[0]];
  one->key = mix(hop->key ^ ((1ULL << 32) + types[0]));
  rest->start += n;
  rest->degree -= n;
  return row;
}
// How many edges of a row will be picked; NO_TYPE if one of its edges has a type without a fanout.
FN i64 count_row(const law_t *law, const hop_t *hop, const row_t *row) {
  row_t rest = *row;
  hop_t one;
  i64 count = 0;
  while (rest.degree) {
    row_t list = next_type(law, hop, &rest, &one);
    if (one.k == NO_TYPE) return NO_TYPE;
    count += count_list(law, &one, &list);
  }
  return count;
}
// Write the n = count_row() chosen positions in the graph's indices to out: type after type.
FN void pick_row(const law_t *law, const hop_t *hop, u64 v, const row_t *row, i64 n, i64 *out,
                double *best) {
  row_t rest = *row;
  hop_t one;
  while (n) {
    row_t list = next_type(law, hop, &rest, &one);
    i64 count = count_list(law, &one, &list);
    if (count) pick_list(law, &one, v, &list, count, out, best);
    out += count;
    best += count;
    n -= count;
  }
}
#endif
