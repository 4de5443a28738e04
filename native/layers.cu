// The layers' kernels, for rows of type IN and results of type OUT (float or bf16), and blocks of
// integers ID.
//
// S destinations, N sources and E edges of a block; K heads. Sums run in the order of the edges, by
// one thread, without atomic additions of floats: the same input gives the same bits in every run.
// A backward pass adds up the gradients that a source receives from its edges, so it first lists
// the edges of every source in their order (`list_*`): counted by atomic additions of integers,
// placed in any order, then ranked.
//
// Shapes may be padded, so that a CUDA graph can hold a step: an index below 0 ends a destination's
// list of edges, and a node below 0 gives a row of zeros. Where a kernel takes `step`, it makes its
// seed on the GPU.
#include "base.h"

// A thread has four neighbouring columns of a row, read and written at once where rows are aligned
// (`whole`); otherwise one by one, and only the `left` of them that exist.
#define EACH UNROLL for (int q = 0; q < 4; q++)
typedef struct ALIGN(16) {
  float x[4];
} four_t;
typedef struct ALIGN(16) {
  int x[4];
} ints_t;
typedef struct ALIGN(4 * sizeof(IN)) {
  IN x[4];
} in_t;
typedef struct ALIGN(4 * sizeof(OUT)) {
  OUT x[4];
} out_t;

FN four_t load(const IN *p, int whole, int left) {
  four_t v;
  if (whole) {
    in_t row = *(const in_t *)p;
    EACH v.x[q] = UP(IN)(row.x[q]);
  } else EACH v.x[q] = !q || q < left ? UP(IN)(p[q]) : 0;
  return v;
}
FN four_t load_floats(const float *p, int whole, int left) {
  four_t v;
  if (whole) return *(const four_t *)p;
  EACH v.x[q] = !q || q < left ? p[q] : 0;
  return v;
}
FN ints_t load_ints(const int *p, int whole, int left) {
  ints_t v;
  if (whole) return *(const ints_t *)p;
  EACH v.x[q] = !q || q < left ? p[q] : 0;
  return v;
}
FN void store(OUT *p, int whole, int left, four_t v) {
  if (whole) {
    out_t row;
    EACH row.x[q] = DOWN(OUT)(v.x[q]);
    *(out_t *)p = row;
  } else EACH if (!q || q < left) p[q] = DOWN(OUT)(v.x[q]);
}
FN void store_floats(float *p, int whole, int left, four_t v) {
  if (whole) *(four_t *)p = v;
  else EACH if (!q || q < left) p[q] = v.x[q];
}
FN void store_ints(int *p, int whole, int left, ints_t v) {
  if (whole) *(ints_t *)p = v;
  else EACH if (!q || q < left) p[q] = v.x[q];
}
FN four_t zeros(void) {
  four_t v = {{0, 0, 0, 0}};
  return v;
}
FN void add(four_t *sum, four_t v) { EACH sum->x[q] += v.x[q]; }
FN void add_scaled(four_t *sum, four_t v, float by) { EACH sum->x[q] += v.x[q] * by; }
FN four_t scaled(four_t v, float by) {
  EACH v.x[q] *= by;
  return v;
}
// The gradient g of what ReLU and dropout made v.
FN four_t keep(four_t v, four_t g, float scale) {
  EACH g.x[q] = v.x[q] > 0 ? g.x[q] * scale : 0;
  return g;
}

// Threads of a row: (width + 3) / 4 of them follow one another; this is the thread's row, this its
// first column.
#define ROW_AND_COLUMN(rows)                        \
  const unsigned parts = (unsigned)(width + 3) / 4; \
  THREAD((i64)(rows) * parts);                      \
  const i64 row = (unsigned)i / parts;              \
  const int column = (int)((unsigned)i % parts * 4), left = width - column

// Edges of destination s, without the padding.
FN ID count_edges_of(const ID *indptr, const ID *indices, i64 s) {
  ID first = indptr[s], last = indptr[s + 1];
  if (last > first && indices[last - 1] < 0)
    for (last = first; indices[last] >= 0;) last++;
  return last - first;
}

// Edges by source. size [N + 1] is zero at first; slot: which of its source's edges an edge is, in
// any order.
KERNEL list_sizes(const ID *indices, int E, int *size, int *slot) {
  THREAD(E);
  if (indices[i] >= 0) slot[i] = atomicAdd(&size[indices[i]], 1);
}
// A thread makes room for 32 lists, in any order.
KERNEL list_starts(int N, int *size, int *start) {
  THREAD((N + 31) / 32);
  const int first = (int)i * 32, last = first + 32 < N ? first + 32 : N;
  int total = 0;
  for (int u = first; u < last; u++) total += size[u];
  int at = atomicAdd(&size[N], total);
  for (int u = first; u < last; u++) {
    start[u] = at;
    at += size[u];
  }
}
KERNEL list_edges(const ID *indices, int E, const int *start, const int *slot, int *list) {
  THREAD(E);
  if (indices[i] >= 0) list[start[indices[i]] + slot[i]] = (int)i;
}
// Each list in the order of the edges: their destinations, and what a mean over the destination's
// edges multiplies by.
KERNEL list_in_order(const ID *indptr, const ID *indices, int S, int E, const int *start,
                     const int *size, const int *list, int *destination, int *edge, float *share) {
  THREAD(E);
  if (indices[i] < 0) return;
  const int first = start[indices[i]], last = first + size[indices[i]];
  int at = first, low = 0, high = S;
  for (int q = first; q < last; q++) at += list[q] < (int)i;
  while (high - low > 1) {  // indptr[low] <= i < indptr[high]
    int middle = (low + high) / 2;
    if (indptr[middle] <= (ID)i) low = middle;
    else high = middle;
  }
  destination[at] = low;
  if (edge) edge[at] = (int)i;
  if (share) share[at] = 1.0f / (float)count_edges_of(indptr, indices, low);
}

// The seed of a layer's dropout: as it is given, or from a run's and the number of the step, which
// lies on the device.
FN u64 dropout_seed(u64 seed, const i64 *step, u64 layer) {
  return step ? mix(mix(seed ^ (u64)*step) ^ layer) : seed;
}
FN float drop_one(float x, u64 bytes, int column, int drop, float scale) {
  return (int)(bytes >> 8 * column & 255) >= drop ? x * scale : 0.0f;
}

// The cross-entropy of each row of logits [S, C], and its gradient; labels below 0 have none.
// Each of 32 threads a row reads all of it, and writes every 32nd column of the gradient.
KERNEL cross_entropy(const float *logits, const i64 *labels, int S, int C, float *loss,
                     float *grad) {
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

KERNEL self_and_mean(const ID *indptr, const ID *indices, const IN *h, const ID *self_rows, int S,
                     int width, int whole, OUT *out) {
  ROW_AND_COLUMN(S);
  const i64 self = self_rows ? self_rows[row] : row;
  const ID first = indptr[row], last = indptr[row + 1];
  ID count = 0;
  four_t own = zeros(), sum = zeros();
  if (self >= 0) own = load(h + self * width + column, whole, left);
  for (ID e = first; e < last && count == e - first; e += 8) {
    four_t v[8];  // on their way together
    int there[8];
    UNROLL for (int j = 0; j < 8; j++) {
      ID u = e + j < last ? indices[e + j] : -1;
      there[j] = u >= 0;
      v[j] = there[j] ? load(h + (i64)u * width + column, whole, left) : zeros();
    }
    UNROLL for (int j = 0; j < 8; j++) if (there[j]) {
      add(&sum, v[j]);
      count++;
    }
  }
  OUT *target = out + 2 * row * width + column;
  store(target, whole, left, own);
  store(target + width, whole, left, scaled(sum, count ? 1.0f / (float)count : 0.0f));
}

// kept: what ReLU and dropout left of the layer below, or null; what they did not leave has no
// gradient.
KERNEL self_and_mean_grad(const int *start, const int *size, const int *destination,
                          const float *share, const IN *grad, int S, int N, int width, int whole,
                          const IN *kept, float scale, OUT *out) {
  ROW_AND_COLUMN(N);
  four_t sum = zeros();
  if (row < S) sum = load(grad + 2 * row * width + column, whole, left);
  const int first = start[row], last = first + size[row];
  for (int q = first; q < last; q += 8) {
    four_t v[8];
    UNROLL for (int j = 0; j < 8; j++) if (q + j < last) {
      v[j] = load(grad + (2 * (i64)destination[q + j] + 1) * width + column, whole, left);
    }
    UNROLL for (int j = 0; j < 8; j++) if (q + j < last) add_scaled(&sum, v[j], share[q + j]);
  }
  if (kept) sum = keep(load(kept + row * width + column, whole, left), sum, scale);
  store(out + row * width + column, whole, left, sum);
}

// ReLU (or not) and dropout (or not); eight columns of a row share a draw of 64 bits, a byte each.
KERNEL relu_dropout(const IN *h, const ID *nodes, int S, int width, int whole, i64 seed,
                    const i64 *step, i64 layer, int relu, int drop, float scale, OUT *out) {
  ROW_AND_COLUMN(S);
  const i64 node = nodes ? nodes[row] : row;
  four_t v = zeros();
  if (node >= 0) {
    v = load(h + row * width + column, whole, left);
    if (relu) EACH v.x[q] = v.x[q] > 0 ? v.x[q] : 0;
    if (drop) {
      u64 key = mix(dropout_seed((u64)seed, step, (u64)layer) ^ (u64)node);
      u64 bytes = finalise(key + (u64)(column / 8) * GOLDEN) >> column % 8 * 8;
      EACH v.x[q] = drop_one(v.x[q], bytes, q, drop, scale);
    }
  }
  store(out + row * width + column, whole, left, v);
}
KERNEL relu_dropout_grad(const IN *h, const IN *grad, int S, int width, int whole, float scale,
                         OUT *out) {
  ROW_AND_COLUMN(S);
  const i64 at = row * width + column;
  four_t v = load(h + at, whole, left), g = load(grad + at, whole, left);
  store(out + at, whole, left, keep(v, g, scale));
}

// The largest of the neighbours' rows by column, and which neighbour's it is: of equal ones the
// first. Without edges zero and -1.
KERNEL max_neighbours(const ID *indptr, const ID *indices, const IN *h, int S, int width, int whole,
                      OUT *out, int *winner) {
  ROW_AND_COLUMN(S);
  four_t best = zeros();
  ints_t from = {{-1, -1, -1, -1}};
  for (ID e = indptr[row]; e < indptr[row + 1] && indices[e] >= 0; e++) {
    const int u = (int)indices[e];
    const four_t v = load(h + (i64)u * width + column, whole, left);
    EACH if (from.x[q] < 0 || v.x[q] > best.x[q]) {
      best.x[q] = v.x[q];
      from.x[q] = u;
    }
  }
  store(out + row * width + column, whole, left, best);
  store_ints(winner + row * width + column, whole, left, from);
}
KERNEL max_neighbours_grad(const int *start, const int *size, const int *destination,
                           const IN *grad, const int *winner, int N, int width, int whole,
                           OUT *out) {
  ROW_AND_COLUMN(N);
  four_t sum = zeros();
  const int first = start[row], last = first + size[row], u = (int)row;
  for (int q = first; q < last; q++) {
    // an edge that is there twice wins once
    if (q > first && destination[q] == destination[q - 1]) continue;
    const i64 at = (i64)destination[q] * width + column;
    const ints_t from = load_ints(winner + at, whole, left);
    const four_t g = load(grad + at, whole, left);
    EACH if (from.x[q] == u) sum.x[q] += g.x[q];
  }
  store(out + row * width + column, whole, left, sum);
}

typedef struct {
  int row, own;  // own: it is no edge, but the destination's own message
  ID source;
} place_t;
FN place_t find_place(const ID *indptr, const ID *indices, const ID *self_rows, int S, i64 at) {
  int low = 0, high = S;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if ((i64)indptr[middle] + middle <= at) low = middle;
    else high = middle;
  }
  place_t place = {low, at == (i64)indptr[low] + low, 0};
  place.source = !place.own ? indices[at - low - 1] : self_rows ? self_rows[low] : (ID)low;
  return place;
}
FN float leaky(float z) { return z > 0 ? z : 0.2f * z; }
FN float slope(float z) { return z > 0 ? 1.0f : 0.2f; }
#define ROUND(weight) UP(IN)(DOWN(IN)(weight))  // to the type of the rows that it multiplies

// scores [E + S, K], then the softmax over each destination's places; `dropped` is what dropout
// leaves of it.
KERNEL attention_softmax(const ID *indptr, const ID *indices, const ID *nodes, int S, int K,
                         i64 seed, const i64 *step, i64 layer, int drop, float scale,
                         float *weights, float *dropped) {
  THREAD((i64)S * K);
  const i64 row = (unsigned)i / (unsigned)K, head = (unsigned)i % (unsigned)K,
            first = indptr[row] + row;
  const i64 last = first + 1 + count_edges_of(indptr, indices, row);
  float top = weights[first * K + head], sum = 0;
  for (i64 at = first + 1; at < last; at++) top = fmaxf(top, weights[at * K + head]);
  for (i64 at = first; at < last; at++)
    sum += weights[at * K + head] = expf(weights[at * K + head] - top);
  const i64 node = nodes ? nodes[row] : row;
  const u64 key = mix(dropout_seed((u64)seed, step, (u64)layer) ^ (u64)node);
  for (i64 at = first; at < last; at++) {
    float weight = weights[at * K + head] /= sum;
    if (!drop) continue;
    u64 bytes = finalise(key + (u64)((at - first) * ((K + 7) / 8) + head / 8) * GOLDEN);
    dropped[at * K + head] = drop_one(weight, bytes, (int)(head % 8), drop, scale);
  }
}
// In: the gradient of what dropout left; out: of the scores.
KERNEL attention_softmax_grad(const ID *indptr, const ID *indices, int S, int K,
                              const float *weights, const float *dropped, float scale,
                              float *grad) {
  THREAD((i64)S * K);
  const i64 row = (unsigned)i / (unsigned)K, head = (unsigned)i % (unsigned)K,
            first = indptr[row] + row;
  const i64 last = first + 1 + count_edges_of(indptr, indices, row);
  float sum = 0;
  for (i64 at = first; at < last; at++) {
    i64 q = at * K + head;
    if (dropped) grad[q] = dropped[q] > 0 ? grad[q] * scale : 0;
    sum += weights[q] * grad[q];
  }
  for (i64 at = first; at < last; at++)
    grad[at * K + head] = weights[at * K + head] * (grad[at * K + head] - sum);
}

// source [N, K, D], target [S, K, D], attn [K, D] -> scores [E + S, K]: attn . leaky_relu(source +
// target)
KERNEL attention_scores(const ID *indptr, const ID *indices, const ID *self_rows, int S, i64 places,
                        int K, int D, int whole, const IN *source, const IN *target,
                        const float *attn, float *scores) {
  THREAD(places * K);
  const place_t place = find_place(indptr, indices, self_rows, S, (unsigned)i / (unsigned)K);
  if (place.source < 0) return;
  const i64 head = (unsigned)i % (unsigned)K;
  const i64 from = (place.source * (i64)K + head) * D, to = (place.row * (i64)K + head) * D;
  float sum = 0;
  for (int c = 0; c < D; c += 4) {
    four_t v = load(source + from + c, whole, D - c),
           a = load_floats(attn + head * D + c, whole, D - c);
    add(&v, load(target + to + c, whole, D - c));
    sum += leaky(v.x[0]) * a.x[0] + leaky(v.x[1]) * a.x[1] + leaky(v.x[2]) * a.x[2] +
           leaky(v.x[3]) * a.x[3];
  }
  scores[i] = sum;
}
// weights [E + S, K] of the messages source [N, K, D] -> out [S, K, D]
KERNEL attention_sum(const ID *indptr, const ID *indices, const ID *self_rows, int S, int K,
                     int width, int whole, const float *weights, const IN *source, OUT *out) {
  ROW_AND_COLUMN((i64)S * K);
  const i64 s = (unsigned)row / (unsigned)K, head = (unsigned)row % (unsigned)K,
            self = self_rows ? self_rows[s] : s;
  const ID first = indptr[s], last = indptr[s + 1];
  const float *weight = weights + (first + s) * K + head;
  four_t sum = zeros();
  add_scaled(&sum, load(source + (self * K + head) * width + column, whole, left), ROUND(*weight));
  for (ID e = first; e < last; e += 8) {
    four_t v[8];
    float by[8];
    UNROLL for (int j = 0; j < 8; j++) {
      ID u = e + j < last ? indices[e + j] : -1;
      by[j] = u < 0 ? 0 : ROUND(weight[(e + j - first + 1) * K]);
      v[j] = u < 0 ? zeros() : load(source + ((i64)u * K + head) * width + column, whole, left);
    }
    UNROLL for (int j = 0; j < 8; j++) add_scaled(&sum, v[j], by[j]);
  }
  store(out + row * width + column, whole, left, sum);
}
// The gradient of the weights: that of out times the message.
KERNEL attention_weight_grad(const ID *indptr, const ID *indices, int S, i64 places, int K, int D,
                             int whole, const IN *source, const IN *grad, float *to_weights) {
  THREAD(places * K);
  const place_t place = find_place(indptr, indices, 0, S, (unsigned)i / (unsigned)K);
  if (place.source < 0) return;
  const i64 head = (unsigned)i % (unsigned)K;
  const i64 from = (place.source * (i64)K + head) * D, to = (place.row * (i64)K + head) * D;
  float sum = 0;
  for (int c = 0; c < D; c += 4) {
    four_t v = load(source + from + c, whole, D - c), g = load(grad + to + c, whole, D - c);
    sum += v.x[0] * g.x[0] + v.x[1] * g.x[1] + v.x[2] * g.x[2] + v.x[3] * g.x[3];
  }
  to_weights[i] = sum;
}
// to_scores [E + S, K] -> the gradient of target, and each destination's part [S, K, D] of that of
// attn.
KERNEL attention_target_grad(const ID *indptr, const ID *indices, int S, int K, int width,
                             int whole, const IN *source, const IN *target, const float *attn,
                             const float *to_scores, OUT *to_target, float *to_attn) {
  ROW_AND_COLUMN((i64)S * K);
  const i64 s = (unsigned)row / (unsigned)K, head = (unsigned)row % (unsigned)K;
  const i64 first = indptr[s], count = count_edges_of(indptr, indices, s);
  const four_t t = load(target + row * width + column, whole, left);
  four_t slopes = zeros(), sums = zeros();
  for (i64 j = 0; j <= count; j++) {
    i64 u = j ? (i64)indices[first + j - 1] : s;
    float by = to_scores[(first + s + j) * K + head];
    four_t v = load(source + (u * K + head) * width + column, whole, left);
    add(&v, t);
    EACH slopes.x[q] += slope(v.x[q]) * by;
    EACH sums.x[q] += leaky(v.x[q]) * by;
  }
  store_floats(to_attn + row * width + column, whole, left, sums);
  four_t a = load_floats(attn + head * width + column, whole, left);
  EACH a.x[q] *= slopes.x[q];
  store(to_target + row * width + column, whole, left, a);
}
// The gradient of source: by way of the scores, and of the weighted sum.
KERNEL attention_source_grad(const ID *indptr, const int *start, const int *size,
                             const int *destination, const int *edge, int S, int N, int K,
                             int width, int whole, const IN *source, const IN *target,
                             const float *attn, const float *weights, const float *to_scores,
                             const IN *grad, OUT *out) {
  ROW_AND_COLUMN((i64)N * K);
  const i64 u = (unsigned)row / (unsigned)K, head = (unsigned)row % (unsigned)K;
  const four_t own = load(source + row * width + column, whole, left);
  const int first = start[u], count = size[u];
  four_t slopes = zeros(), sum = zeros();
  for (int q = u < S ? -1 : 0; q < count; q++) {  // -1: to itself
    const i64 s = q < 0 ? u : destination[first + q],
              at = s + (q < 0 ? (i64)indptr[u] : edge[first + q] + 1);
    four_t v = load(target + (s * K + head) * width + column, whole, left);
    add(&v, own);
    const float by = to_scores[at * K + head];
    EACH slopes.x[q] += slope(v.x[q]) * by;
    v = load(grad + (s * K + head) * width + column, whole, left);
    add_scaled(&sum, v, ROUND(weights[at * K + head]));
  }
  const four_t a = load_floats(attn + head * width + column, whole, left);
  EACH sum.x[q] += a.x[q] * slopes.x[q];
  store(out + row * width + column, whole, left, sum);
}

// Rows of any type, as words of 16, 4 or 2 bytes; ids of 4 or 8 bytes, as those of edges are int64
// in any graph.
KERNEL gather_rows(const void *table, const void *ids, int n, int words, int word_bytes,
                   int id_bytes, i64 V, void *out) {
  THREAD((i64)n * words);
  const i64 row = (unsigned)i / (unsigned)words, column = (unsigned)i % (unsigned)words;
  const i64 id = id_bytes == 8 ? ((const i64 *)ids)[row] : ((const int *)ids)[row];
  const i64 from = id * words + column, to = row * words + column;
  const ints_t nothing = {{0, 0, 0, 0}};
  if (id >= V) FAIL;
  if (word_bytes == 16) ((ints_t *)out)[to] = id < 0 ? nothing : ((const ints_t *)table)[from];
  else if (word_bytes == 4) ((int *)out)[to] = id < 0 ? 0 : ((const int *)table)[from];
  else ((short *)out)[to] = id < 0 ? 0 : ((const short *)table)[from];
}
