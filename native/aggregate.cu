// The outermost hop in one kernel: draws K neighbours of each destination, averages their rows and
// writes only the result. LANES threads per row of out, each with VEC columns of every VEC LANES;
// ROWS feature rows are in flight at once. Rows have type IN, results type OUT (float or bf16).
#include "batch.h"
#define ROWS 8

typedef struct ALIGN(VEC * sizeof(IN)) {
  IN x[VEC];
} in_t;
typedef struct ALIGN(VEC * sizeof(OUT)) {
  OUT x[VEC];
} out_t;

KERNEL pick_aggregate(batch_t b, part_t part, const in_t *features, i64 width, out_t *out) {
  THREAD(part.rows * LANES);
  i64 row = i / LANES, v = 0, start = 0;
  int n = 0;
  unsigned place[K];
  ID node[K];
  if (row < part.state->num_dst) {
    v = b.src[row];
    start = b.law.indptr[v];
    i64 degree = degree_of(&b, v);
    n = (int)(b.law.rule == REPLACE ? degree ? K : 0 : degree < K ? degree : K);
    choose(K, part.state->key, (ID)v, (unsigned)degree, K, n, b.law.rule == REPLACE, place);
  }
  read_nodes(K, &b, start, place, n, node);
  float scale = n ? 1.0f / (float)n : 0.0f;
  int padding = row >= part.state->num_dst;
  for (i64 c = i % LANES; c < width; c += LANES) {
    in_t own = features[v * width + c], rows[ROWS];
    float sum[VEC];
    out_t result;
    UNROLL for (int x = 0; x < VEC; x++) sum[x] = 0;
    UNROLL for (int a = 0; a < K; a += ROWS) {
      UNROLL for (int j = 0; j < ROWS; j++) if (a + j < K && a + j < n) rows[j] =
          features[node[a + j] * width + c];
      UNROLL for (int j = 0; j < ROWS; j++) if (a + j < K && a + j < n) {
        UNROLL for (int x = 0; x < VEC; x++) sum[x] += UP(IN)(rows[j].x[x]);
      }
    }
    UNROLL for (int x = 0; x < VEC; x++) result.x[x] =
        padding ? DOWN(OUT)(0.0f) : DOWN(OUT)(UP(IN)(own.x[x]));
    out[row * 2 * width + c] = result;
    UNROLL for (int x = 0; x < VEC; x++) result.x[x] = DOWN(OUT)(sum[x] * scale);
    out[row * 2 * width + width + c] = result;
  }
}
