// The layers' kernels, as CUDA and, compiled by cc with -DHOST, as C for CPUs: for rows of type IN,
// results of type OUT (float or bf16) and blocks of integers ID.
//
// S destinations, N sources and E edges of a block; K heads. Sums run in the order of the edges, by
// one thread, without atomic additions of floats: the same input gives the same bits in every run.
// A backward pass sums the gradients that a source receives from its edges, so it first lists every
// source's edges in order (`list_*`): counted by integer atomics, placed in any order, then ranked.
//
// Shapes may be padded, so that a CUDA graph can hold a step: an index below 0 ends a destination's
// list of edges, and a node below 0 gives a row of zeros. A kernel that takes `step` computes its
// seed on the GPU.
#include "dropout.h"

// On the host prefetch `width` columns of the rows ids[first .. last - 1] of a table. Nothing on a
// GPU, where other threads run while one waits.
#ifdef HOST
#define FETCH(table, stride, width, ids, first, last)          \
  for (i64 e_ = (first), last_ = (last); e_ < last_; e_++)     \
    for (i64 c_ = 0; c_ < (width); c_ += 64 / (i64)sizeof(IN)) \
  __builtin_prefetch((table) + (i64)(ids)[e_] * (stride) + c_)
#else
#define FETCH(...) (void)0
#endif
// Prefetch a thread's columns: of the sources of destination s + 2, destinations of source u + 2.
#define FETCH_SOURCES(s, table, stride) \
  if (s + 2 < S) FETCH(table, stride, 1, indices, indptr[s + 2], indptr[s + 3])
#define FETCH_DESTINATIONS(u, table, stride) \
  if (u + 2 < N) FETCH(table, stride, 1, destination, start[u + 2], start[u + 2] + size[u + 2])

// Number of edges of destination s, without the padding.
FN ID count_edges_of(const ID *indptr, const ID *indices, i64 s) {
  ID first = indptr[s], last = indptr[s + 1];
  if (last > first && indices[last - 1] < 0)
    for (last = first; indices[last] >= 0;) last++;
  return last - first;
}

// The destination of each edge.
KERNEL destinations(const ID *indptr, int S, int *dst) {
  THREAD(S);
  for (ID e = indptr[i]; e < indptr[i + 1]; e++) dst[e] = (int)i;
}
// Lists of edges by source, without what is behind the last destination's. size [N] starts at zero; slot
// [E]: index of an edge in its source's list, in any order.
KERNEL list_sizes(const ID *indptr, const ID *indices, int S, int *size, int *slot) {
  THREAD(indptr[S]);
  if (indices[i] >= 0) slot[i] = atomicAdd(&size[indices[i]], 1);
}
KERNEL list_edges(const ID *indptr, const ID *indices, int S, const int *start, const int *slot,
                  int *list) {
  THREAD(indptr[S]);
  if (indices[i] >= 0) list[start[indices[i]] + slot[i]] = (int)i;
}
// Bring each list into the order of the edges: their destinations, and as share of each edge beta
// [S], or 1, over the number of its destination's edges. A thread has a place in the lists, which
// begin at start[0] and stop before `end`: those of a long list are neighbours, which read it together.
KERNEL list_in_order(const ID *indptr, const ID *indices, const int *dst, int E, const int *start,
                     const int *size, const int *end, const int *list, const float *beta,
                     int *destination, int *edge, float *share) {
  THREAD(E);
  if (start[0] + i >= *end) return;
  const int e = list[start[0] + i], s = dst[e];
  const int first = start[indices[e]], last = first + size[indices[e]];
  int at = first;
  for (int q = first; q < last; q++) at += list[q] < e;
  destination[at] = s;
  edge[at] = e;
  share[at] = (beta ? beta[s] : 1.0f) / (float)count_edges_of(indptr, indices, s);
}

// Adam step for rows [n] of a weight and its moments, by their gradient grad [n, width]; negative
// rows are skipped. rates: learning rate and root of the second moment's bias, both corrected.
KERNEL adam_rows(const i64 *rows, const IN *grad, int n, int width, int whole, float first,
                 float second, float eps, const float *rates, float *mean, float *square,
                 float *weight) {
  ROW_AND_COLUMN(n);
  if (rows[row] < 0) return;
  const i64 at = rows[row] * width + column;
  const floats_t g = load(grad + row * width + column, whole, left);
  const floats_t m = load_floats(mean + at, whole, left) * first + g * (1 - first);
  const floats_t v = load_floats(square + at, whole, left) * second + g * g * (1 - second);
  floats_t step;
  EACH step[q] = -rates[0] * m[q] / (sqrtf(v[q]) / rates[1] + eps);
  store_floats(mean + at, whole, left, m);
  store_floats(square + at, whole, left, v);
  store_floats(weight + at, whole, left, load_floats(weight + at, whole, left) + step);
}

// out [S, 2 width]: own row and mean of the neighbours' rows; or, with alpha and beta [S], out
// [S, width]: alpha own + beta mean, of rows times gamma [N] unless that is null. Rows of codes are
// decoded, see `decode`: on the CPU as they are read, with the bits of rows that were decoded before; on
// a GPU their mean, since a code's value is linear in it.
KERNEL plain_self_and_mean(const ID *indptr, const ID *indices, const IN *h, const ID *self_rows,
                           const float *alpha, const float *beta, const float *gamma, int S,
                           int width, int whole, const float *steps, OUT *out) {
  ROW_AND_COLUMN(S);
  const i64 s = row, self = self_rows ? self_rows[s] : s;
  const ID first = indptr[s], last = indptr[s + 1];
  ID count = 0;
  FETCH_SOURCES(s, h + column, width);
  if (self_rows && s + 2 < S) FETCH(h + column, width, 1, self_rows, s + 2, s + 3);
  floats_t own = all_of(0), sum = all_of(0);
  if (self >= 0) own = load(h + self * width + column, whole, left);
  for (ID e = first; e < last && count == e - first; e += GROUP) {
    ID u[GROUP];
    floats_t v[GROUP];
    UNROLL for (int j = 0; j < GROUP; j++) u[j] = e + j < last ? indices[e + j] : -1;
    UNROLL for (int j = 0; j < GROUP; j++)
      v[j] = u[j] < 0 ? all_of(0) : load(h + (i64)u[j] * width + column, whole, left);
    UNROLL for (int j = 0; j < GROUP; j++) {
#ifdef HOST
      if (sizeof(IN) == 1) v[j] = decode(v[j], steps + column, width, whole, left);
#endif
      if (gamma && u[j] >= 0) v[j] = v[j] * gamma[u[j]];
      count += u[j] >= 0;
      sum = sum + v[j];
    }
  }
  floats_t mean = sum * (count ? (alpha ? beta[s] : 1.0f) / (float)count : 0.0f);
  if (sizeof(IN) == 1) {
    if (self >= 0) own = decode(own, steps + column, width, whole, left);
#ifndef HOST
    if (count) mean = decode(mean, steps + column, width, whole, left);
#endif
  }
  if (alpha) {
    store(out + row * width + column, whole, left, own * alpha[s] + mean);
    return;
  }
  OUT *target = out + 2 * row * width + column;
  store(target, whole, left, own);
  store(target + width, whole, left, mean);
}

#ifndef HOST
// Two vectors of columns, which share a draw of dropout; a row may end after the first.
typedef struct {
  floats_t x[2];
} pair_t;
FN pair_t load_pair(const IN *p, int whole, int left) {
  pair_t v = {{all_of(0), all_of(0)}};
  v.x[0] = load(p, whole, left);
  if (left > COLUMNS) v.x[1] = load(p + COLUMNS, whole, left - COLUMNS);
  return v;
}
FN void store_pair(OUT *p, int whole, int left, pair_t v) {
  store(p, whole, left, v.x[0]);
  if (left > COLUMNS) store(p + COLUMNS, whole, left - COLUMNS, v.x[1]);
}
FN pair_t activate_pair(pair_t v, i64 node, int column, int drop, float scale, u64 layer_seed) {
  const u64 key = drop ? mix(layer_seed ^ (u64)node) : 0;
  const u64 bytes = drop ? finalise(key + (u64)(column / 8) * GOLDEN) : 0;
  UNROLL for (int half = 0; half < 2; half++) EACH {
    float x = v.x[half][q] < 0.0f ? 0.0f : v.x[half][q];  // NaN stays
    if (drop) x = drop_one(x, bytes, half * COLUMNS + q, drop, scale);
    v.x[half][q] = node < 0 ? 0.0f : x;
  }
  return v;
}
#endif

// The same of rows to which ReLU and dropout are applied as they are read; kept, unless null, gets
// the bits of the results. Threads have pairs of vectors. On the host these are a separate pass.
KERNEL self_and_mean(const ID *indptr, const ID *indices, const IN *h, const ID *self_rows,
                     const float *alpha, const float *beta, const float *gamma, int S, int width,
                     int whole, const ID *nodes, int drop, float scale, i64 seed, const i64 *step,
                     i64 layer, kept_t *kept, OUT *out) {
#ifndef HOST
  const unsigned parts = (unsigned)(width + COLUMNS - 1) / COLUMNS, pairs = (parts + 1) / 2;
  THREAD((i64)S * pairs);
  const i64 s = (unsigned)i / pairs, self = self_rows ? self_rows[s] : s;
  const int column = (int)((unsigned)i % pairs) * 2 * COLUMNS, left = width - column;
  const ID first = indptr[s], last = indptr[s + 1];
  const u64 layer_seed = LAYER_SEED;
  ID count = 0;
  pair_t own = {{all_of(0), all_of(0)}}, sum = own;
  if (self >= 0) {
    own = load_pair(h + self * width + column, whole, left);
    own = activate_pair(own, NODE_OF(self), column, drop, scale, layer_seed);
    KEEP_PAIR(self, own);
  }
  for (ID e = first; e < last && count == e - first; e += PAIR_GROUP) {
    ID u[PAIR_GROUP];
    i64 node[PAIR_GROUP];
    pair_t v[PAIR_GROUP];
    // all loads before the first store of bits: the compiler may not move a load ahead of a store
    UNROLL for (int j = 0; j < PAIR_GROUP; j++) u[j] = e + j < last ? indices[e + j] : -1;
    UNROLL for (int j = 0; j < PAIR_GROUP; j++) {
      if (u[j] >= 0) v[j] = load_pair(h + (i64)u[j] * width + column, whole, left);
      node[j] = u[j] >= 0 ? NODE_OF(u[j]) : 0;
    }
    UNROLL for (int j = 0; j < PAIR_GROUP; j++) {
      if (u[j] < 0) continue;
      v[j] = activate_pair(v[j], node[j], column, drop, scale, layer_seed);
      KEEP_PAIR(u[j], v[j]);
      count++;
      UNROLL for (int half = 0; half < 2; half++)
        sum.x[half] = sum.x[half] + (gamma ? v[j].x[half] * gamma[u[j]] : v[j].x[half]);
    }
  }
  const float by = count ? (alpha ? beta[s] : 1.0f) / (float)count : 0.0f;
  UNROLL for (int half = 0; half < 2; half++) {
    sum.x[half] = sum.x[half] * by;
    if (alpha) sum.x[half] = own.x[half] * alpha[s] + sum.x[half];
  }
  OUT *target = out + (alpha ? 1 : 2) * s * width + column;
  if (!alpha) {
    store_pair(target, whole, left, own);
    target += width;
  }
  store_pair(target, whole, left, sum);
#endif
}

// The lists of hubs would keep one thread busy while all others are done. So a kernel that sums over
// lists by source is launched twice: the first launch has tiles of TILE places, counted from the first
// list's, as rows and puts the sums of those which are of one source into `tiles`; the second adds them
// up as `tile_sums`, with the places around them.
#define TILE 32  // as in kernels.py
#ifdef HOST
#define WHOLE_TILE 0
#define STOP last
#else
#define WHOLE_TILE (tile_sums && (q - start[0]) % TILE == 0 && q + TILE <= last)
#define STOP min(last, q + TILE - (q - start[0]) % TILE)
#endif
#define TILE_SUM(stride) tile_sums + (q - start[0]) / TILE * (i64)(stride) + column
#define ADD_WHOLE_TILE                                     \
  if (WHOLE_TILE) {                                        \
    sum = sum + load_floats(TILE_SUM(width), whole, left); \
    q += TILE;                                             \
    continue;                                              \
  }                                                        \
  (void)0
// Set source u and the places q to last - 1 of its list or of a tile.
#define LIST_OR_TILE(row)                      \
  i64 u = row;                                 \
  int q = start[0] + (int)(row) * TILE, last;  \
  if (tiles) {                                 \
    if (q >= *end) return;                     \
    u = indices[edge[q]];                      \
  }                                            \
  last = start[u] + size[u];                   \
  if (tiles && q + TILE > last) return;        \
  if (tiles) last = q + TILE;                  \
  else q = start[u]

// grad: of the pair [S, 2 width] or, with alpha, of the sum [S, width]. With kept, out [N, width]
// is the gradient of the input of ReLU and dropout. Each column has `runs` threads with `run` rows
// each; sums [runs, width], unless null, gets the sums of out over each thread's rows.
KERNEL self_and_mean_grad(const ID *indices, const int *edge, const int *start, const int *size,
                          const int *end, const int *destination, const float *share,
                          const IN *grad, const float *alpha, const float *gamma, int S, int N,
                          int width, int whole, const kept_t *kept, float scale, int runs, int run,
                          const float *tile_sums, float *tiles, float *sums, OUT *out) {
  ROW_AND_COLUMN(runs);
  const int stride = alpha ? width : 2 * width;
  const IN *mean_grad = grad + stride - width;
  floats_t added = all_of(0);
  for (i64 at = row * run; at < N && at < (row + 1) * run; at++) {
    LIST_OR_TILE(at);
    const float by = gamma ? gamma[u] : 1.0f;
    FETCH_DESTINATIONS(u + run - 1, mean_grad + column, stride);
    floats_t sum = all_of(0);
    if (u < S) sum = load(grad + u * stride + column, whole, left) * (alpha ? alpha[u] : 1.0f);
    while (q < last) {
      ADD_WHOLE_TILE;
      const int stop = STOP;
      BY_TWO for (; q < stop; q++) {
        const float part = share[q] * by;
        sum = sum + load(mean_grad + (i64)destination[q] * stride + column, whole, left) * part;
      }
    }
    if (tiles) {
      store_floats(tiles + at * width + column, whole, left, sum);
      return;
    }
    if (kept) sum = keep(PAIR_WAS_KEPT(u), sum, scale);
    store(out + u * width + column, whole, left, sum);
    added = added + sum;
  }
  if (sums) store_floats(sums + row * width + column, whole, left, added);
}

KERNEL relu_dropout(const IN *h, int S, int width, int whole, int relu, const ID *nodes,
                    int drop, float scale, i64 seed, const i64 *step, i64 layer, kept_t *kept,
                    OUT *out) {
  ROW_AND_COLUMN(S);
  const i64 at = row * width + column;
  const floats_t read = load(h + at, whole, left);
  const floats_t v = activate(read, relu, NODE_OF(row), column, drop, scale, LAYER_SEED);
  store(out + at, whole, left, v);
  KEEP_BITS(row, v);
}
KERNEL relu_dropout_grad(const kept_t *kept, const IN *grad, int S, int width, int whole,
                         float scale, OUT *out) {
  ROW_AND_COLUMN(S);
  const i64 at = row * width + column;
  store(out + at, whole, left, keep(WHERE_KEPT(row), load(grad + at, whole, left), scale));
}

// Column-wise maximum of the neighbours' rows, and which neighbour it is from, the first of equal
// ones; zero and -1 without edges.
KERNEL max_neighbours(const ID *indptr, const ID *indices, const IN *h, int S, int width, int whole,
                      OUT *out, int *winner) {
  ROW_AND_COLUMN(S);
  FETCH_SOURCES(row, h + column, width);
  floats_t best = all_of(0);
  ints_t from = all_of_int(-1);
  for (ID e = indptr[row]; e < indptr[row + 1] && indices[e] >= 0; e++) {
    const int u = (int)indices[e];
    const floats_t v = load(h + (i64)u * width + column, whole, left);
    const ints_t wins = (from < 0) | (v > best);
    best = choose(wins, v, best);
    from = choose(wins, all_of_int(u), from);
  }
  store(out + row * width + column, whole, left, best);
  store_ints(winner + row * width + column, whole, left, from);
}
KERNEL max_neighbours_grad(const ID *indices, const int *edge, const int *start, const int *size,
                           const int *end, const int *destination, const IN *grad,
                           const int *winner, int N, int width, int whole, const float *tile_sums,
                           float *tiles, OUT *out) {
  ROW_AND_COLUMN(N);
  LIST_OR_TILE(row);
  FETCH_DESTINATIONS(u, grad + column, width);
  FETCH_DESTINATIONS(u, winner + column, width);
  floats_t sum = all_of(0);
  while (q < last) {
    ADD_WHOLE_TILE;
    // a duplicate edge, whose destination is that of the edge before, wins once
    int before = q > start[u] ? destination[q - 1] : -1;
    const int stop = STOP;
    ONE_BY_ONE for (; q < stop; q++) {
      const int s = destination[q];
      const ints_t from = load_ints(winner + (i64)s * width + column, whole, left);
      const floats_t g = load(grad + (i64)s * width + column, whole, left);
      sum = sum + choose(from == (s == before ? -1 : (int)u), g, all_of(0));
      before = s;
    }
  }
  if (tiles) store_floats(tiles + row * width + column, whole, left, sum);
  else store(out + row * width + column, whole, left, sum);
}

// A destination's attention weights are that of its self-loop, then those of its edges. Number i of
// E + S stands for edge i or, from E on, for the self-loop of destination i - E; edge features
// [E + S, wide] are in this order.
typedef struct {
  i64 row, source, at;
} place_t;
FN place_t find_place(const ID *indptr, const ID *indices, const ID *self_rows, const int *dst,
                      int E, i64 i) {
  const i64 row = i < E ? dst[i] : i - E;
  const i64 own = self_rows ? (i64)self_rows[row] : row;
  const place_t place = {row, i < E ? (i64)indices[i] : own, row + (i < E ? i + 1 : indptr[row])};
  return place;
}
// Split a number i below 1 << 32 into that of a row and that of one of its heads.
#define ROW_AND_HEAD(row, i) \
  const i64 row = (unsigned)(i) / (unsigned)K, head = (unsigned)(i) % (unsigned)K
// Set a thread's place and head, and where the message and the destination's row begin: from, to.
#define PLACE_AND_HEAD(self_rows)                                                   \
  THREAD(((i64)E + S) * K);                                                         \
  ROW_AND_HEAD(number, i);                                                          \
  const place_t place = find_place(indptr, indices, self_rows, dst, E, number);     \
  if (place.source < 0) return;                                                     \
  if (!head && number + 16 < E)                                                     \
    FETCH(source, (i64)K * D, (i64)K * D, indices, number + 16, number + 17);       \
  const i64 from = (place.source * K + head) * D, to = (place.row * K + head) * D
// Set a thread's destination and head, and its places: first to last - 1.
#define PLACES_OF_ROW              \
  THREAD((i64)S * K);              \
  ROW_AND_HEAD(row, i);            \
  const i64 first = indptr[row] + row; \
  const i64 last = first + 1 + count_edges_of(indptr, indices, row)
#define ROUND(weight) UP(IN)(DOWN(IN)(weight))  // to the type of the rows that it multiplies

// What an edge's features add to a thread's columns: edge [wide] times the columns at `by` of a
// matrix [wide, stride].
FN floats_t edge_term(const float *edge, int wide, const float *by, i64 stride, int whole, int left) {
  floats_t v = all_of(0);
  ONE_BY_ONE for (int k = 0; k < wide; k++) v = v + load_floats(by + k * stride, whole, left) * edge[k];
  return v;
}

// weights [E + S, K]: in, scores; out, their softmax over each destination's places. dropped: the
// weights after dropout.
KERNEL attention_softmax(const ID *indptr, const ID *indices, const ID *nodes, int S, int K,
                         i64 seed, const i64 *step, i64 layer, int drop, float scale,
                         float *weights, float *dropped) {
  PLACES_OF_ROW;
  float top = weights[first * K + head], sum = 0;
  for (i64 at = first + 1; at < last; at++) top = fmaxf(top, weights[at * K + head]);
  for (i64 at = first; at < last; at++)
    sum += weights[at * K + head] = expf(weights[at * K + head] - top);
  const u64 key = mix(LAYER_SEED ^ ~(u64)NODE_OF(row));
  for (i64 at = first; at < last; at++) {
    float weight = weights[at * K + head] /= sum;
    if (!drop) continue;
    u64 bytes = finalise(key + (u64)((at - first) * ((K + 7) / 8) + head / 8) * GOLDEN);
    dropped[at * K + head] = drop_one(weight, bytes, (int)(head % 8), drop, scale);
  }
}
// to_scores, a gradient: in, of the weights after dropout; out, of the scores.
KERNEL attention_softmax_grad(const ID *indptr, const ID *indices, int S, int K,
                              const float *weights, const float *dropped, int drop, float scale,
                              float *to_scores) {
  PLACES_OF_ROW;
  float sum = 0;
  for (i64 at = first; at < last; at++) {
    i64 q = at * K + head;
    if (drop) to_scores[q] = dropped[q] > 0 ? to_scores[q] * scale : 0;
    sum += weights[q] * to_scores[q];
  }
  for (i64 at = first; at < last; at++)
    to_scores[at * K + head] = weights[at * K + head] * (to_scores[at * K + head] - sum);
}

// source [N, K, D], target [S, K, D], attn [K, D], edges [E + S, wide], by [wide, K, D] -> weights
// [E + S, K], still scores: attn . leaky_relu(source + target + edges by)
KERNEL attention_scores(const ID *indptr, const ID *indices, const ID *self_rows, const int *dst,
                        int S, int E, int K, int D, int whole, const IN *source, const IN *target,
                        const float *attn, const float *edges, int wide, const float *by,
                        float *weights, int *slopes) {
  PLACE_AND_HEAD(self_rows);
  floats_t sum = all_of(0);
  ints_t bits = all_of_int(0);
  for (int c = 0; c < D; c += COLUMNS) {
    const floats_t z =
        load(source + from + c, whole, D - c) + load(target + to + c, whole, D - c) +
        edge_term(edges + number * wide, wide, by + head * D + c, (i64)K * D, whole, D - c);
    sum = sum + leaky(z) * load_floats(attn + head * D + c, whole, D - c);
    if (!slopes) continue;
    bits = bits | choose(z > 0.0f, all_of_int(SLOPE_BIT(c)), all_of_int(0));
    if (SLOPE_BIT(c) > 0 && c + COLUMNS < D) continue;  // not the last of 32
    int *words = slopes + (place.at * K + head) * SLOPE_WORDS(D);
    store_ints(words + SLOPE_WORD(c), 1, COLUMNS, bits);
    bits = all_of_int(0);
  }
  weights[place.at * K + head] = total(sum);
}
// dropped, weights [E + S, K] of the messages source [N, K, D] -> out [S, K, D]
KERNEL attention_sum(const ID *indptr, const ID *indices, const ID *self_rows, int S, int K,
                     int width, int whole, const float *dropped, const IN *source, OUT *out) {
  ROW_AND_COLUMN((i64)S * K);
  ROW_AND_HEAD(s, row);
  const i64 self = self_rows ? self_rows[s] : s;
  const ID first = indptr[s], last = indptr[s + 1];
  const float *weight = dropped + (first + s) * K + head;
  FETCH_SOURCES(s, source + head * width + column, (i64)K * width);
  floats_t sum = load(source + (self * K + head) * width + column, whole, left) * ROUND(*weight);
  for (ID e = first; e < last; e += GROUP) {
    floats_t v[GROUP];
    float by[GROUP];
    UNROLL for (int j = 0; j < GROUP; j++) {
      ID u = e + j < last ? indices[e + j] : -1;
      by[j] = u < 0 ? 0 : ROUND(weight[(e + j - first + 1) * K]);
      v[j] = u < 0 ? all_of(0) : load(source + ((i64)u * K + head) * width + column, whole, left);
    }
    UNROLL for (int j = 0; j < GROUP; j++) sum = sum + v[j] * by[j];
  }
  store(out + row * width + column, whole, left, sum);
}
// Gradient of the weights: the gradient of out times the message.
KERNEL attention_weight_grad(const ID *indptr, const ID *indices, const int *dst, int S, int E,
                             int K, int D, int whole, const IN *source, const IN *grad,
                             float *to_scores) {
  PLACE_AND_HEAD(0);
  floats_t sum = all_of(0);
  for (int c = 0; c < D; c += COLUMNS)
    sum = sum + load(source + from + c, whole, D - c) * load(grad + to + c, whole, D - c);
  to_scores[place.at * K + head] = total(sum);
}
// Slopes of leaky ReLU at a thread's columns of a place's head, from the bits of `attention_scores`.
FN floats_t slopes_of(const int *slopes, i64 at, int width, int column) {
  const int *words = slopes + at * SLOPE_WORDS(width) + SLOPE_WORD(column);
  const ints_t on = (load_ints(words, 1, COLUMNS) & SLOPE_BIT(column)) == SLOPE_BIT(column);
  return choose(on, all_of(1.0f), all_of(0.2f));
}
// to_scores [E + S, K] -> the gradient of target. The gradient of attn is the sum over all edges of
// slope * to_score * (source + target + edges by). Here each run of rows adds up the part of target,
// below that of source, in to_attn [runs, K, D]; that of the edges follows from edge_matrix_grad.
KERNEL attention_target_grad(const ID *indptr, const ID *indices, int S, int K, int width,
                             int whole, const int *slopes, const IN *target, const float *attn,
                             const float *to_scores, int runs, int run, OUT *to_target,
                             float *to_attn) {
  ROW_AND_COLUMN((i64)runs * K);
  ROW_AND_HEAD(part, row);
  const floats_t a = load_floats(attn + head * width + column, whole, left);
  floats_t added = all_of(0);
  for (i64 s = part * run; s < S && s < (part + 1) * run; s++) {
    floats_t sums = all_of(0);
    const i64 first = indptr[s] + s, last = first + count_edges_of(indptr, indices, s);
    for (i64 at = first * K + head; at <= last * K + head; at += K)
      sums = sums + slopes_of(slopes, at, width, column) * to_scores[at];
    const i64 to = (s * K + head) * width + column;
    added = added + sums * load(target + to, whole, left);
    store(to_target + to, whole, left, a * sums);
  }
  store_floats(to_attn + row * width + column, whole, left, added);
}
// Gradient of source, through the scores and through the weighted sum: of tiles two sums each.
KERNEL attention_source_grad(const ID *indptr, const ID *indices, const int *edge,
                             const int *start, const int *size, const int *end,
                             const int *destination, int S, int N, int K, int width, int whole,
                             const int *slopes, const IN *source, const float *attn,
                             const float *dropped, const float *to_scores, const IN *grad,
                             int runs, int run, const float *tile_sums, float *tiles, OUT *out,
                             float *to_attn) {
  ROW_AND_COLUMN((i64)runs * K);
  ROW_AND_HEAD(part, row);
  const i64 stride = (i64)K * width, from = head * width + column;
  const floats_t a = load_floats(attn + from, whole, left);
  floats_t added = all_of(0);
  for (i64 at = part * run; at < N && at < (part + 1) * run; at++) {
    LIST_OR_TILE(at);
    FETCH_DESTINATIONS(u + run - 1, grad + head * width + column, stride);
    floats_t sums = all_of(0), sum = all_of(0);
    if (u < S) q--;  // the self-loop
    while (q < last) {
      const int own = q < start[u];
      if (!own && WHOLE_TILE) {
        const float *of = TILE_SUM(2 * stride) + head * width;
        sums = sums + load_floats(of, whole, left);
        sum = sum + load_floats(of + stride, whole, left);
        q += TILE;
        continue;
      }
      const int stop = own ? q + 1 : STOP;
      ONE_BY_ONE for (; q < stop; q++) {
        const i64 s = own ? u : destination[q];
        const i64 place = (s + (own ? (i64)indptr[u] : edge[q] + 1)) * K + head;
        sums = sums + slopes_of(slopes, place, width, column) * to_scores[place];
        sum = sum + load(grad + s * stride + from, whole, left) * ROUND(dropped[place]);
      }
    }
    if (tiles) {
      store_floats(tiles + 2 * at * stride + from, whole, left, sums);
      store_floats(tiles + (2 * at + 1) * stride + from, whole, left, sum);
      return;
    }
    added = added + sums * load(source + u * stride + from, whole, left);
    store(out + u * stride + from, whole, left, sum + a * sums);
  }
  store_floats(to_attn + row * width + column, whole, left, added);
}

// GINE: the sum of relu(h + edges by) over a destination's edges, h [N, width], edges [E, wide], by
// [wide, width] -> out [S, width]. Only the end of a block with edge features is padded.
KERNEL edge_sums(const ID *indptr, const ID *indices, const IN *h, const float *edges, int wide,
                 const float *by, int S, int width, int whole, OUT *out) {
  ROW_AND_COLUMN(S);
  FETCH_SOURCES(row, h + column, width);
  floats_t sum = all_of(0);
  for (ID e = indptr[row]; e < indptr[row + 1]; e++) {
    const floats_t z = load(h + (i64)indices[e] * width + column, whole, left) +
                       edge_term(edges + (i64)e * wide, wide, by + column, width, whole, left);
    sum = sum + choose(z < 0.0f, all_of(0), z);
  }
  store(out + row * width + column, whole, left, sum);
}
KERNEL edge_sums_grad(const int *start, const int *size, const int *destination, const int *edge,
                      const IN *h, const float *edges, int wide, const float *by, const IN *grad,
                      int N, int width, int whole, OUT *out) {
  ROW_AND_COLUMN(N);
  const int first = start[row], last = first + size[row];
  FETCH_DESTINATIONS(row, grad + column, width);
  const floats_t own = load(h + row * width + column, whole, left);
  floats_t sum = all_of(0);
  for (int q = first; q < last; q++) {
    const floats_t z = own + edge_term(edges + (i64)edge[q] * wide, wide, by + column, width, whole,
                                     left);
    sum = sum + keep(z > 0.0f, load(grad + (i64)destination[q] * width + column, whole, left), 1);
  }
  store(out + row * width + column, whole, left, sum);
}
// Gradient of `by`, for attention's scores (numbers = E + S, rows and source null) but for the factor
// attn, or for GINE's sums (numbers = E, slopes null, rows: the gradient). The `numbers` are cut into
// `runs`, and each run has its own sum in to_by [runs, wide, K, width].
KERNEL edge_matrix_grad(const ID *indptr, const ID *indices, const int *dst, int E, int numbers,
                        int K, int width, int whole, const IN *source, const IN *rows,
                        const int *slopes, const float *edges, int wide, const float *by,
                        const float *to_scores, int runs, float *to_by) {
  ROW_AND_COLUMN((i64)runs * K);
  ROW_AND_HEAD(run, row);
  const i64 first = (u64)run * (unsigned)numbers / (unsigned)runs;
  const i64 last = (u64)(run + 1) * (unsigned)numbers / (unsigned)runs;
  const i64 stride = (i64)K * width, from = head * width + column;
  for (int k = 0; k < wide; k += 8) {
    floats_t sums[8], g;
    UNROLL for (int j = 0; j < 8; j++) sums[j] = all_of(0);
    for (i64 number = first; number < last; number++) {
      const place_t place = find_place(indptr, indices, 0, dst, E, number);
#ifndef HOST  // where no block is padded
      if (place.source < 0) continue;
#endif
      const float *edge = edges + number * wide;
      if (slopes) {
        const i64 at = place.at * K + head;
        g = slopes_of(slopes, at, width, column) * to_scores[at];
      } else {
        const floats_t z = load(source + place.source * stride + from, whole, left) +
                           edge_term(edge, wide, by + from, stride, whole, left);
        g = keep(z > 0.0f, load(rows + place.row * stride + from, whole, left), 1);
      }
      UNROLL for (int j = 0; j < 8; j++) if (k + j < wide) sums[j] = sums[j] + g * edge[k + j];
    }
    for (int j = 0; j < 8 && k + j < wide; j++)
      store_floats(to_by + (run * wide + k + j) * stride + from, whole, left, sums[j]);
  }
}

// Cross-entropy of logits [S, C] and classes y [S], below 0 where a row has none -> loss [S], and the
// gradient of their sum. A row has `lanes` threads: each reads all of it, and writes the gradient of
// every lanes-th column.
KERNEL cross_entropy(const IN *logits, const i64 *y, int S, int C, int lanes, float *loss,
                     OUT *grad) {
  THREAD((i64)S * lanes);
  const i64 row = (unsigned)i / (unsigned)lanes;
  const int lane = (int)((unsigned)i % (unsigned)lanes);
  if (y[row] >= C) FAIL;
  const int of = (int)y[row];
  const IN *x = logits + row * C;
  float top = UP(IN)(x[0]), sum = 0;
  for (int c = 1; c < C; c++) top = fmaxf(top, UP(IN)(x[c]));
  for (int c = 0; c < C; c++) sum += expf(UP(IN)(x[c]) - top);
  if (!lane) loss[row] = of < 0 ? 0 : logf(sum) + top - UP(IN)(x[of]);
  for (int c = lane; c < C; c += lanes) {
    const float g = expf(UP(IN)(x[c]) - top) / sum - (float)(c == of);
    grad[row * C + c] = DOWN(OUT)(of < 0 ? 0 : g);
  }
}

// Sums of the columns of rows [n, width] over each of `runs` runs of rows, in sums [runs, width].
KERNEL column_sums(const IN *rows, int n, int width, int whole, int runs, int run, float *sums) {
  ROW_AND_COLUMN(runs);
  floats_t sum = all_of(0);
  for (i64 at = row * run; at < n && at < (row + 1) * run; at++)
    sum = sum + load(rows + at * width + column, whole, left);
  store_floats(sums + row * width + column, whole, left, sum);
}

// Gather rows of any type; ids have 4 or 8 bytes: those of edges are int64 in any graph. On a GPU a
// thread has a word of 16, 4, 2 or 1 bytes of a row. On the host it has the row, prefetched `ahead`
// rows early, and `bad` counts ids out of range.
#define ID_AT(row) (id_bytes == 8 ? ((const i64 *)ids)[row] : ((const int *)ids)[row])
KERNEL gather_rows(const void *table, const void *ids, int n, int words, int word_bytes,
                   int id_bytes, i64 V, int ahead, int *bad, void *out) {
#ifdef HOST
  THREAD(n);
  const i64 bytes = (i64)words * word_bytes, id = ID_AT(i);
  const char *rows = (const char *)table, *soon = rows + ID_AT(min(i + ahead, n - 1)) * bytes;
  for (i64 c = 0; c < bytes; c += 64) __builtin_prefetch(soon + c);
  __builtin_prefetch(soon + bytes - 1);
  if ((u64)id < (u64)V) memcpy((char *)out + i * bytes, rows + id * bytes, bytes);
  else atomicAdd(bad, 1);
#else
  THREAD((i64)n * words);
  const i64 id = ID_AT((unsigned)i / (unsigned)words);
  const i64 from = id * words + (unsigned)i % (unsigned)words;
  typedef struct ALIGN(16) {
    int x[4];
  } word_t;
  const word_t nothing = {{0}};
  if (id >= V) FAIL;
  if (word_bytes == 16) ((word_t *)out)[i] = id < 0 ? nothing : ((const word_t *)table)[from];
  else if (word_bytes == 4) ((int *)out)[i] = id < 0 ? 0 : ((const int *)table)[from];
  else if (word_bytes == 2) ((short *)out)[i] = id < 0 ? 0 : ((const short *)table)[from];
  else ((char *)out)[i] = id < 0 ? 0 : ((const char *)table)[from];
#endif
}

// Gather rows of codes and decode them.
KERNEL gather_codes(const IN *table, const ID *ids, const float *steps, int n, int width, int whole,
                    i64 V, OUT *out) {
  ROW_AND_COLUMN(n);
  const i64 id = ids[row];
  if (id >= V) FAIL;
  floats_t v = all_of(0);
  if (id >= 0) {
    v = load(table + id * width + column, whole, left);
    v = decode(v, steps + column, width, whole, left);
  }
  store(out + row * width + column, whole, left, v);
}

// Functions for the CPU only.
#ifdef HOST
i64 columns_of_a_thread(void) { return COLUMNS; }

// Whether a block's offsets rise from 0 to E, and indices and rows [S], unless null, are below N.
int fits_block(const ID *indptr, const ID *indices, const ID *self_rows, i64 S, i64 E, i64 N) {
  i64 signs = 0;
  for (i64 s = 0; s < S; s++) signs |= indptr[s] | (indptr[s + 1] - indptr[s]);
  for (i64 e = 0; e < E; e++) signs |= indices[e] | (N - 1 - indices[e]);
  for (i64 s = 0; self_rows && s < S; s++) signs |= self_rows[s] | (N - 1 - self_rows[s]);
  return S >= 0 && signs >= 0 && indptr[0] == 0 && indptr[S] == E;
}

// List the edges of each source in order, as `list_*` do on a GPU. size [N] starts at zero.
void list_by_source(const ID *indptr, const ID *indices, const int *dst, i64 E, i64 N, int *start,
                int *size, const float *beta, int *destination, int *edge, float *share) {
  int at = 0;
  for (i64 e = 0; e < E; e++) size[indices[e]]++;
  for (i64 u = 0; u < N; at += size[u++]) start[u] = at;
  memset(size, 0, sizeof(int) * N);
  for (i64 e = 0; e < E; e++) {
    i64 q = start[indices[e]] + size[indices[e]]++;
    destination[q] = dst[e];
    edge[q] = (int)e;
    const ID count = indptr[dst[e] + 1] - indptr[dst[e]];
    share[q] = (beta ? beta[dst[e]] : 1.0f) / (float)count;
  }
}
#endif
