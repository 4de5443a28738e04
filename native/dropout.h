// ReLU and dropout of a row's columns. The mask is a function of seed, step, layer, node and column.
#include "vectors.h"

// The seed of a layer's dropout: `seed` itself, or, with `step`, the step number in GPU memory,
// derived from the run's seed, step and layer.
FN u64 dropout_seed(u64 seed, const i64 *step, u64 layer) {
  return step ? mix(mix(seed ^ (u64)*step) ^ layer) : seed;
}
FN float drop_one(float x, u64 bytes, int column, int drop, float scale) {
  return (int)(bytes >> 8 * column & 255) >= drop ? x * scale : 0.0f;
}
// Eight columns of a row share a draw of 64 bits, a byte each.
FN floats_t drop_columns(floats_t v, u64 key, int column, int drop, float scale) {
#if COLUMNS >= 8
  u64 draws[COLUMNS / 8];
  for (int at = 0; at < COLUMNS / 8; at++) draws[at] = finalise(key + (column / 8 + at) * GOLDEN);
  unsigned char bytes __attribute__((vector_size(COLUMNS)));
  memcpy(&bytes, draws, COLUMNS);
  return choose(__builtin_convertvector(bytes, ints_t) < drop, all_of(0), v * scale);
#else
  u64 bytes = finalise(key + (u64)(column / 8) * GOLDEN) >> column % 8 * 8;
  EACH v[q] = drop_one(v[q], bytes, q, drop, scale);
  return v;
#endif
}

// Apply ReLU (if relu) and dropout (if drop) to columns of a row; a node below 0 gives zeros. A thread
// computes the layer's seed once, for all its rows.
#define LAYER_SEED (drop ? dropout_seed((u64)seed, step, (u64)layer) : 0)
#define NODE_OF(row) (nodes ? (i64)nodes[row] : (i64)(row))
FN floats_t activate(floats_t v, int relu, i64 node, int column, int drop, float scale,
                     u64 layer_seed) {
  if (node < 0) return all_of(0);
  if (relu) v = choose(v < 0.0f, all_of(0), v);  // NaN stays
  if (!drop) return v;
  return drop_columns(v, mix(layer_seed ^ (u64)node), column, drop, scale);
}
