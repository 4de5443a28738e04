"""CUDA source of the layers' kernels, which fused_cuda.py launches.

Sums run in the order of the edges, by one thread, without atomic additions of floats: the same input gives the same
bits in every run. A backward pass adds up what a source node was given by its edges, so it first lists the edges of
every source in their order (`list_*`): counted by atomic additions of integers, placed in any order, then ranked.

Shapes may be padded, so that a CUDA graph can hold a step: an index below 0 ends a destination's list of edges, and a
node below 0 gives a row of zeros. Where a kernel takes `step`, it makes its seed on the GPU.

Letters: S destinations, N sources, E edges of a block; F, D feature widths; K heads; C classes. ID is the integer type
of a block.
"""

import functools

import torch

TYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
IDS = {torch.int32: "int", torch.int64: "long long"}
WORDS = {16: "int_four_t", 4: "int", 2: "short"}

# Every thread has four neighbouring columns of a row, in one access of 16 or 8 bytes where rows are aligned ("whole").
_HEAD = r"""
#ifdef __CUDACC__
#define ALIGN(n) __align__(n)
#define FETCH_ADD atomicAdd
#define FAIL __trap()
#else
#include <math.h>
#include <stdlib.h>
#define ALIGN(n)
#define FETCH_ADD __sync_fetch_and_add
#define FAIL abort()
#endif
typedef struct { unsigned short bits; } bf16;
typedef struct ALIGN(16) { float x, y, z, w; } four_t;
typedef struct ALIGN(8) { unsigned short x, y, z, w; } short_four_t;
typedef struct ALIGN(16) { int x, y, z, w; } int_four_t;

FN float bits_to_float(unsigned bits) { union { unsigned bits; float number; } u; u.bits = bits; return u.number; }
FN unsigned float_to_bits(float x) { union { unsigned bits; float number; } u; u.number = x; return u.bits; }
FN float up_float(float x) { return x; }
FN float up_bf16(bf16 x) { return bits_to_float((unsigned)x.bits << 16); }
FN float down_float(float x) { return x; }
FN unsigned short round_bits(float x) {  // to nearest, ties to even
  unsigned bits = float_to_bits(x);
  return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
FN bf16 down_bf16(float x) { bf16 y; y.bits = round_bits(x); return y; }

// Four columns of which `left` are there, the others read as zero.
FN four_t load_float(const float *p, int whole, int left) {
  if (whole) return *(const four_t *)p;
  four_t v = {p[0], left > 1 ? p[1] : 0, left > 2 ? p[2] : 0, left > 3 ? p[3] : 0};
  return v;
}
FN four_t load_bf16(const bf16 *p, int whole, int left) {
  short_four_t s = {0, 0, 0, 0};
  if (whole) s = *(const short_four_t *)p;
  else {
    s.x = p[0].bits;
    if (left > 1) s.y = p[1].bits;
    if (left > 2) s.z = p[2].bits;
    if (left > 3) s.w = p[3].bits;
  }
  four_t v = {bits_to_float((unsigned)s.x << 16), bits_to_float((unsigned)s.y << 16),
              bits_to_float((unsigned)s.z << 16), bits_to_float((unsigned)s.w << 16)};
  return v;
}
FN void store_float(float *p, int whole, int left, four_t v) {
  if (whole) { *(four_t *)p = v; return; }
  p[0] = v.x;
  if (left > 1) p[1] = v.y;
  if (left > 2) p[2] = v.z;
  if (left > 3) p[3] = v.w;
}
FN void store_bf16(bf16 *p, int whole, int left, four_t v) {
  if (whole) {
    short_four_t s = {round_bits(v.x), round_bits(v.y), round_bits(v.z), round_bits(v.w)};
    *(short_four_t *)p = s;
    return;
  }
  p[0] = down_bf16(v.x);
  if (left > 1) p[1] = down_bf16(v.y);
  if (left > 2) p[2] = down_bf16(v.z);
  if (left > 3) p[3] = down_bf16(v.w);
}
FN int_four_t load_int(const int *p, int whole, int left) {
  if (whole) return *(const int_four_t *)p;
  int_four_t v = {p[0], left > 1 ? p[1] : 0, left > 2 ? p[2] : 0, left > 3 ? p[3] : 0};
  return v;
}
FN void store_int(int *p, int whole, int left, int_four_t v) {
  if (whole) { *(int_four_t *)p = v; return; }
  p[0] = v.x;
  if (left > 1) p[1] = v.y;
  if (left > 2) p[2] = v.z;
  if (left > 3) p[3] = v.w;
}
FN four_t zeros(void) { four_t v = {0, 0, 0, 0}; return v; }
FN void add(four_t *sum, four_t v) { sum->x += v.x; sum->y += v.y; sum->z += v.z; sum->w += v.w; }
FN void add_scaled(four_t *sum, four_t v, float by) {
  sum->x += v.x * by;
  sum->y += v.y * by;
  sum->z += v.z * by;
  sum->w += v.w * by;
}
// The gradient g of what ReLU and dropout made v.
FN four_t keep(four_t v, four_t g, float scale) {
  g.x = v.x > 0 ? g.x * scale : 0;
  g.y = v.y > 0 ? g.y * scale : 0;
  g.z = v.z > 0 ? g.z * scale : 0;
  g.w = v.w > 0 ? g.w * scale : 0;
  return g;
}
FN four_t scaled(four_t v, float by) { v.x *= by; v.y *= by; v.z *= by; v.w *= by; return v; }

// Threads of a row: (width + 3) / 4 of them follow one another; this is the thread's row, this its first column.
#define ROW_AND_COLUMN(rows)                                                       \
  const unsigned parts = (unsigned)(width + 3) / 4;                                \
  THREAD((i64)(rows) * parts);                                                     \
  const i64 row = (unsigned)i / parts;                                             \
  const int column = (int)((unsigned)i % parts * 4), left = width - column

// Edges of destination s, without the padding.
FN ID count_edges_of(const ID *indptr, const ID *indices, i64 s) {
  ID first = indptr[s], last = indptr[s + 1];
  if (last > first && indices[last - 1] < 0) for (last = first; indices[last] >= 0;) last++;
  return last - first;
}

// Edges by source. size [N + 1] is zero at first; slot: which of its source's edges an edge is, in any order.
KERNEL list_sizes(const ID *indices, int E, int *size, int *slot) {
  THREAD(E);
  if (indices[i] >= 0) slot[i] = FETCH_ADD(&size[indices[i]], 1);
}
KERNEL list_starts(int N, int *size, int *start) {  // a thread makes room for 32 lists; in any order
  THREAD((N + 31) / 32);
  const int first = (int)i * 32, last = first + 32 < N ? first + 32 : N;
  int total = 0;
  for (int u = first; u < last; u++) total += size[u];
  int at = FETCH_ADD(&size[N], total);
  for (int u = first; u < last; u++) {
    start[u] = at;
    at += size[u];
  }
}
KERNEL list_edges(const ID *indices, int E, const int *start, const int *slot, int *list) {
  THREAD(E);
  if (indices[i] >= 0) list[start[indices[i]] + slot[i]] = (int)i;
}
// Each list in the order of the edges: their destinations, and what a mean over the destination's edges multiplies by.
KERNEL list_in_order(const ID *indptr, const ID *indices, int S, int E, const int *start, const int *size,
                     const int *list, int *destination, int *edge, float *share) {
  THREAD(E);
  if (indices[i] < 0) return;
  const int first = start[indices[i]], last = first + size[indices[i]];
  int at = first, low = 0, high = S;
  for (int q = first; q < last; q++) at += list[q] < (int)i;
  while (high - low > 1) {  // indptr[low] <= i < indptr[high]
    int middle = (low + high) / 2;
    if (indptr[middle] <= (ID)i) low = middle; else high = middle;
  }
  destination[at] = low;
  if (edge) edge[at] = (int)i;
  if (share) share[at] = 1.0f / (float)count_edges_of(indptr, indices, low);
}

FN u64 scramble(u64 z) {  // of splitmix64
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}
#define GOLDEN 0x9e3779b97f4a7c15ULL
// The seed of a layer's dropout: as it is given, or from a run's and the number of the step, which lies on the device.
FN u64 dropout_seed(u64 seed, const i64 *step, u64 layer) {
  return step ? scramble((scramble((seed ^ (u64)*step) + GOLDEN) ^ layer) + GOLDEN) : seed;
}
FN float drop_one(float x, u64 bytes, int column, int drop, float scale) {
  return (int)(bytes >> 8 * column & 255) >= drop ? x * scale : 0.0f;
}

// The cross-entropy of each row of logits [S, C], and its gradient; labels below 0 have none.
// Each of 32 threads a row reads all of it, and writes every 32nd column of the gradient.
KERNEL cross_entropy(const float *logits, const i64 *labels, int S, int C, float *loss, float *grad) {
  THREAD((i64)S * 32);
  const i64 row = i / 32, label = labels[row];
  const float *x = logits + row * C;
  float top = x[0], sum = 0;
  for (int c = 1; c < C; c++) top = fmaxf(top, x[c]);
  for (int c = 0; c < C; c++) sum += expf(x[c] - top);
  if (i % 32 == 0) loss[row] = label < 0 ? 0.0f : logf(sum) - (x[label] - top);
  for (int c = (int)(i % 32); c < C; c += 32) {
    grad[row * C + c] = label < 0 ? 0.0f : expf(x[c] - top) / sum - (c == label ? 1.0f : 0.0f);
  }
}
"""

# Kernels for every type of rows IN (or T) and results OUT.
_PAIR = r"""
KERNEL self_and_mean_${IN}_${OUT}(const ID *indptr, const ID *indices, const ${IN} *h, const ID *self_rows, int S,
                                  int width, int whole, ${OUT} *out) {
  ROW_AND_COLUMN(S);
  const i64 self = self_rows ? self_rows[row] : row;
  const ID first = indptr[row], last = indptr[row + 1];
  ID count = 0;
  four_t own = zeros(), sum = zeros();
  if (self >= 0) own = load_${IN}(h + self * width + column, whole, left);
  for (ID e = first; e < last && count == e - first; e += 8) {
    four_t v[8];  // on their way together
    int there[8];
    UNROLL for (int j = 0; j < 8; j++) {
      ID u = e + j < last ? indices[e + j] : -1;
      there[j] = u >= 0;
      v[j] = there[j] ? load_${IN}(h + (i64)u * width + column, whole, left) : zeros();
    }
    UNROLL for (int j = 0; j < 8; j++) if (there[j]) {
      add(&sum, v[j]);
      count++;
    }
  }
  ${OUT} *target = out + 2 * row * width + column;
  store_${OUT}(target, whole, left, own);
  store_${OUT}(target + width, whole, left, scaled(sum, count ? 1.0f / (float)count : 0.0f));
}
"""
_EACH = r"""
// kept: what ReLU and dropout left of the layer below, or null; what they did not leave has no gradient.
KERNEL self_and_mean_grad_${T}(const int *start, const int *size, const int *destination, const float *share,
                               const ${T} *grad, int S, int N, int width, int whole, const ${T} *kept, float scale,
                               ${T} *out) {
  ROW_AND_COLUMN(N);
  four_t sum = zeros();
  if (row < S) sum = load_${T}(grad + 2 * row * width + column, whole, left);
  const int first = start[row], last = first + size[row];
  for (int q = first; q < last; q += 8) {
    four_t v[8];
    float by[8];
    UNROLL for (int j = 0; j < 8; j++) if (q + j < last) {
      by[j] = share[q + j];
      v[j] = load_${T}(grad + (2 * (i64)destination[q + j] + 1) * width + column, whole, left);
    }
    UNROLL for (int j = 0; j < 8; j++) if (q + j < last) add_scaled(&sum, v[j], by[j]);
  }
  if (kept) sum = keep(load_${T}(kept + row * width + column, whole, left), sum, scale);
  store_${T}(out + row * width + column, whole, left, sum);
}

// ReLU (or not) and dropout (or not); eight columns of a row share a draw of 64 bits, a byte each.
KERNEL relu_dropout_${T}(const ${T} *h, const ID *nodes, int S, int width, int whole, i64 seed, const i64 *step,
                         i64 layer, int relu, int drop, float scale, ${T} *out) {
  ROW_AND_COLUMN(S);
  const i64 node = nodes ? nodes[row] : row;
  four_t v = zeros();
  if (node >= 0) {
    v = load_${T}(h + row * width + column, whole, left);
    if (relu) {
      v.x = v.x > 0 ? v.x : 0;
      v.y = v.y > 0 ? v.y : 0;
      v.z = v.z > 0 ? v.z : 0;
      v.w = v.w > 0 ? v.w : 0;
    }
    if (drop) {
      u64 key = scramble((dropout_seed((u64)seed, step, (u64)layer) ^ (u64)node) + GOLDEN);
      u64 bytes = scramble(key + (u64)(column / 8) * GOLDEN) >> column % 8 * 8;
      v.x = drop_one(v.x, bytes, 0, drop, scale);
      v.y = drop_one(v.y, bytes, 1, drop, scale);
      v.z = drop_one(v.z, bytes, 2, drop, scale);
      v.w = drop_one(v.w, bytes, 3, drop, scale);
    }
  }
  store_${T}(out + row * width + column, whole, left, v);
}
KERNEL relu_dropout_grad_${T}(const ${T} *h, const ${T} *grad, int S, int width, int whole, float scale, ${T} *out) {
  ROW_AND_COLUMN(S);
  const i64 at = row * width + column;
  four_t v = load_${T}(h + at, whole, left), g = load_${T}(grad + at, whole, left);
  store_${T}(out + at, whole, left, keep(v, g, scale));
}

// The largest of the neighbours' rows by column, and which neighbour's it is: of equal ones the first. Without edges
// zero and -1.
KERNEL max_${T}(const ID *indptr, const ID *indices, const ${T} *h, int S, int width, int whole, ${T} *out,
                int *winner) {
  ROW_AND_COLUMN(S);
  four_t best = zeros();
  int_four_t from = {-1, -1, -1, -1};
  for (ID e = indptr[row]; e < indptr[row + 1] && indices[e] >= 0; e++) {
    const int u = (int)indices[e];
    const four_t v = load_${T}(h + (i64)u * width + column, whole, left);
    if (from.x < 0 || v.x > best.x) { best.x = v.x; from.x = u; }
    if (from.y < 0 || v.y > best.y) { best.y = v.y; from.y = u; }
    if (from.z < 0 || v.z > best.z) { best.z = v.z; from.z = u; }
    if (from.w < 0 || v.w > best.w) { best.w = v.w; from.w = u; }
  }
  store_${T}(out + row * width + column, whole, left, best);
  store_int(winner + row * width + column, whole, left, from);
}
KERNEL max_grad_${T}(const int *start, const int *size, const int *destination, const ${T} *grad, const int *winner,
                     int N, int width, int whole, ${T} *out) {
  ROW_AND_COLUMN(N);
  four_t sum = zeros();
  const int first = start[row], last = first + size[row], u = (int)row;
  for (int q = first; q < last; q++) {
    if (q > first && destination[q] == destination[q - 1]) continue;  // an edge that is there twice wins once
    const i64 at = (i64)destination[q] * width + column;
    const int_four_t from = load_int(winner + at, whole, left);
    const four_t g = load_${T}(grad + at, whole, left);
    if (from.x == u) sum.x += g.x;
    if (from.y == u) sum.y += g.y;
    if (from.z == u) sum.z += g.z;
    if (from.w == u) sum.w += g.w;
  }
  store_${T}(out + row * width + column, whole, left, sum);
}
"""
# Attention: a destination's own message stands before those of its edges, so edge e of destination s is at place
# e + s + 1.
_ATTENTION = r"""
typedef struct { int row, own; ID source; } place_t;  // own: it is no edge, but the destination's own message
FN place_t find_place(const ID *indptr, const ID *indices, const ID *self_rows, int S, i64 at) {
  int low = 0, high = S;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if ((i64)indptr[middle] + middle <= at) low = middle; else high = middle;
  }
  place_t place = {low, at == (i64)indptr[low] + low, 0};
  place.source = !place.own ? indices[at - low - 1] : self_rows ? self_rows[low] : (ID)low;
  return place;
}
FN float leaky(float z) { return z > 0 ? z : 0.2f * z; }
FN float slope(float z) { return z > 0 ? 1.0f : 0.2f; }

// scores [E + S, K], then the softmax over each destination's places; `dropped` is what dropout leaves of it.
KERNEL attention_softmax(const ID *indptr, const ID *indices, const ID *nodes, int S, int K, i64 seed,
                         const i64 *step, i64 layer, int drop, float scale, float *weights, float *dropped) {
  THREAD((i64)S * K);
  const i64 row = (unsigned)i / (unsigned)K, head = (unsigned)i % (unsigned)K, first = indptr[row] + row;
  const i64 last = first + 1 + count_edges_of(indptr, indices, row);
  float top = weights[first * K + head], sum = 0;
  for (i64 at = first + 1; at < last; at++) top = fmaxf(top, weights[at * K + head]);
  for (i64 at = first; at < last; at++) sum += weights[at * K + head] = expf(weights[at * K + head] - top);
  const i64 node = nodes ? nodes[row] : row;
  const u64 key = scramble((dropout_seed((u64)seed, step, (u64)layer) ^ (u64)node) + GOLDEN);
  for (i64 at = first; at < last; at++) {
    float weight = weights[at * K + head] /= sum;
    if (!drop) continue;
    u64 bytes = scramble(key + (u64)((at - first) * ((K + 7) / 8) + head / 8) * GOLDEN);
    dropped[at * K + head] = drop_one(weight, bytes, (int)(head % 8), drop, scale);
  }
}
// In: the gradient of what dropout left; out: of the scores.
KERNEL attention_softmax_grad(const ID *indptr, const ID *indices, int S, int K, const float *weights,
                              const float *dropped, float scale, float *grad) {
  THREAD((i64)S * K);
  const i64 row = (unsigned)i / (unsigned)K, head = (unsigned)i % (unsigned)K, first = indptr[row] + row;
  const i64 last = first + 1 + count_edges_of(indptr, indices, row);
  float sum = 0;
  for (i64 at = first; at < last; at++) {
    i64 q = at * K + head;
    if (dropped) grad[q] = dropped[q] > 0 ? grad[q] * scale : 0;
    sum += weights[q] * grad[q];
  }
  for (i64 at = first; at < last; at++) grad[at * K + head] = weights[at * K + head] * (grad[at * K + head] - sum);
}
"""
_ATTENTION_EACH = r"""
// source [N, K, D], target [S, K, D], attn [K, D] -> scores [E + S, K]: attn . leaky_relu(source + target)
KERNEL attention_scores_${T}(const ID *indptr, const ID *indices, const ID *self_rows, int S, i64 places, int K,
                             int D, int whole, const ${T} *source, const ${T} *target, const float *attn,
                             float *scores) {
  THREAD(places * K);
  const place_t place = find_place(indptr, indices, self_rows, S, (unsigned)i / (unsigned)K);
  if (place.source < 0) return;
  const i64 head = (unsigned)i % (unsigned)K;
  const i64 from = (place.source * (i64)K + head) * D, to = (place.row * (i64)K + head) * D;
  float sum = 0;
  for (int c = 0; c < D; c += 4) {
    four_t v = load_${T}(source + from + c, whole, D - c), a = load_float(attn + head * D + c, whole, D - c);
    add(&v, load_${T}(target + to + c, whole, D - c));
    sum += leaky(v.x) * a.x + leaky(v.y) * a.y + leaky(v.z) * a.z + leaky(v.w) * a.w;
  }
  scores[i] = sum;
}
// weights [E + S, K] of the messages source [N, K, D] -> out [S, K, D]
KERNEL attention_sum_${T}(const ID *indptr, const ID *indices, const ID *self_rows, int S, int K, int width,
                          int whole, const float *weights, const ${T} *source, ${T} *out) {
  ROW_AND_COLUMN((i64)S * K);
  const i64 s = (unsigned)row / (unsigned)K, head = (unsigned)row % (unsigned)K, self = self_rows ? self_rows[s] : s;
  const ID first = indptr[s], last = indptr[s + 1];
  const float *weight = weights + (first + s) * K + head;
  four_t sum = zeros();
  add_scaled(&sum, load_${T}(source + (self * K + head) * width + column, whole, left), up_${T}(down_${T}(*weight)));
  for (ID e = first; e < last; e += 8) {
    four_t v[8];
    float by[8];
    UNROLL for (int j = 0; j < 8; j++) {
      ID u = e + j < last ? indices[e + j] : -1;
      by[j] = u < 0 ? 0 : up_${T}(down_${T}(weight[(e + j - first + 1) * K]));
      v[j] = u < 0 ? zeros() : load_${T}(source + ((i64)u * K + head) * width + column, whole, left);
    }
    UNROLL for (int j = 0; j < 8; j++) add_scaled(&sum, v[j], by[j]);
  }
  store_${T}(out + row * width + column, whole, left, sum);
}
// The gradient of the weights: that of out times the message.
KERNEL attention_weight_grad_${T}(const ID *indptr, const ID *indices, int S, i64 places, int K, int D, int whole,
                                  const ${T} *source, const ${T} *grad, float *to_weights) {
  THREAD(places * K);
  const place_t place = find_place(indptr, indices, 0, S, (unsigned)i / (unsigned)K);
  if (place.source < 0) return;
  const i64 head = (unsigned)i % (unsigned)K;
  const i64 from = (place.source * (i64)K + head) * D, to = (place.row * (i64)K + head) * D;
  float sum = 0;
  for (int c = 0; c < D; c += 4) {
    four_t v = load_${T}(source + from + c, whole, D - c), g = load_${T}(grad + to + c, whole, D - c);
    sum += v.x * g.x + v.y * g.y + v.z * g.z + v.w * g.w;
  }
  to_weights[i] = sum;
}
// to_scores [E + S, K] -> the gradient of target, and each destination's part [S, K, D] of that of attn.
KERNEL attention_target_grad_${T}(const ID *indptr, const ID *indices, int S, int K, int width, int whole,
                                  const ${T} *source, const ${T} *target, const float *attn, const float *to_scores,
                                  ${T} *to_target, float *to_attn) {
  ROW_AND_COLUMN((i64)S * K);
  const i64 s = (unsigned)row / (unsigned)K, head = (unsigned)row % (unsigned)K;
  const i64 first = indptr[s], count = count_edges_of(indptr, indices, s);
  const four_t t = load_${T}(target + row * width + column, whole, left);
  four_t slopes = zeros(), sums = zeros();
  for (i64 j = 0; j <= count; j++) {
    i64 u = j ? (i64)indices[first + j - 1] : s;
    float by = to_scores[(first + s + j) * K + head];
    four_t v = load_${T}(source + (u * K + head) * width + column, whole, left);
    add(&v, t);
    four_t d = {slope(v.x), slope(v.y), slope(v.z), slope(v.w)}, l = {leaky(v.x), leaky(v.y), leaky(v.z), leaky(v.w)};
    add_scaled(&slopes, d, by);
    add_scaled(&sums, l, by);
  }
  store_float(to_attn + row * width + column, whole, left, sums);
  four_t a = load_float(attn + head * width + column, whole, left);
  a.x *= slopes.x;
  a.y *= slopes.y;
  a.z *= slopes.z;
  a.w *= slopes.w;
  store_${T}(to_target + row * width + column, whole, left, a);
}
// The gradient of source: by way of the scores, and of the weighted sum.
KERNEL attention_source_grad_${T}(const ID *indptr, const int *start, const int *size, const int *destination,
                                  const int *edge, int S, int N, int K, int width, int whole, const ${T} *source,
                                  const ${T} *target, const float *attn, const float *weights,
                                  const float *to_scores, const ${T} *grad, ${T} *out) {
  ROW_AND_COLUMN((i64)N * K);
  const i64 u = (unsigned)row / (unsigned)K, head = (unsigned)row % (unsigned)K;
  const four_t own = load_${T}(source + row * width + column, whole, left);
  const int first = start[u], count = size[u];
  four_t slopes = zeros(), sum = zeros();
  for (int q = u < S ? -1 : 0; q < count; q++) {  // -1: to itself
    const i64 s = q < 0 ? u : destination[first + q], at = s + (q < 0 ? (i64)indptr[u] : edge[first + q] + 1);
    four_t v = load_${T}(target + (s * K + head) * width + column, whole, left);
    add(&v, own);
    four_t d = {slope(v.x), slope(v.y), slope(v.z), slope(v.w)};
    add_scaled(&slopes, d, to_scores[at * K + head]);
    v = load_${T}(grad + (s * K + head) * width + column, whole, left);
    add_scaled(&sum, v, up_${T}(down_${T}(weights[at * K + head])));
  }
  const four_t a = load_float(attn + head * width + column, whole, left);
  sum.x += a.x * slopes.x;
  sum.y += a.y * slopes.y;
  sum.z += a.z * slopes.z;
  sum.w += a.w * slopes.w;
  store_${T}(out + row * width + column, whole, left, sum);
}
"""
# Rows of any type, as words of 16, 4 or 2 bytes; ids of both types, as those of edges are int64 in any graph.
_GATHER = r"""
KERNEL gather_rows_${WORD}_${BITS}(const ${WORD} *table, const ${ANY} *ids, int n, int words, i64 V, ${WORD} *out) {
  THREAD((i64)n * words);
  const i64 row = (unsigned)i / (unsigned)words, column = (unsigned)i % (unsigned)words, id = ids[row];
  ${WORD} word = {0};
  if (id >= V) FAIL;
  if (id >= 0) word = table[id * words + column];
  out[row * words + column] = word;
}
"""


@functools.cache
def source(ids):
    """CUDA source of all kernels for blocks of an integer type; without DIALECT, with which it has to begin."""

    def each(text, **words):
        for name, word in words.items():
            text = text.replace("${" + name + "}", word)
        return text

    parts = [f"typedef {IDS[ids]} ID;\n", _HEAD]
    parts += [each(_PAIR, IN=a, OUT=b) for a in TYPES.values() for b in TYPES.values()]
    parts += [each(_EACH, T=t) for t in TYPES.values()] + [_ATTENTION]
    parts += [each(_ATTENTION_EACH, T=t) for t in TYPES.values()]
    parts += [each(_GATHER, WORD=w, ANY=c, BITS=str(8 * i.itemsize)) for w in WORDS.values() for i, c in IDS.items()]
    return "".join(parts)
