// The outermost hop in one kernel: draws K neighbours of each destination, averages their rows and
// writes only the result. LANES threads per row of out, each with VEC columns of every VEC LANES;
// ROWS feature rows are in flight at once. Rows have type IN (float, bf16 or codes), results type OUT
// (float or bf16). The mean of codes is decoded: a code's value is linear in it.
#include "batch.h"
#define ROWS 8

typedef struct ALIGN(VEC * sizeof(IN)) {
  IN x[VEC];
} in_t;
typedef struct ALIGN(VEC * sizeof(OUT)) {
  OUT x[VEC];
} out_t;
typedef struct ALIGN(VEC * 4) {
  float x[VEC];
} floats_t;

// steps [2, width]: see `decode` of vectors.h; null unless rows are codes.
KERNEL pick_aggregate(batch_t b, part_t part, const in_t *features, i64 width,
                      const floats_t *steps, out_t *out) {
  THREAD(part.rows * LANES);
  i64 row = i / LANES, v = 0, start = 0;
  int n = 0;
  unsigned place[K];
  ID node[K];
  if (row < part.state->num_dst) {
    v = b.src[row];
    start = b.spec.indptr[v];
    hop_t hop = {0, K};
    row_t list = {start, degree_of(&b, v)};
    n = (int)count_list(&b.spec, &hop, &list);
    choose(K, part.state->key, (ID)v, (unsigned)list.degree, K, n, b.spec.rule == REPLACE, place);
  }
  read_nodes(K, &b, start, place, n, node);
  float scale = n ? 1.0f / (float)n : 0.0f;
  int padding = row >= part.state->num_dst;
  for (i64 c = i % LANES; c < width; c += LANES) {
    in_t rows[ROWS], row_v = features[v * width + c];
    float own[VEC], sum[VEC];
    out_t result;
    UNROLL for (int x = 0; x < VEC; x++) sum[x] = 0;
    UNROLL for (int a = 0; a < K; a += ROWS) {
      UNROLL for (int j = 0; j < ROWS; j++) if (a + j < K && a + j < n) rows[j] =
          features[node[a + j] * width + c];
      UNROLL for (int j = 0; j < ROWS; j++) if (a + j < K && a + j < n) {
        UNROLL for (int x = 0; x < VEC; x++) sum[x] += UP(IN)(rows[j].x[x]);
      }
    }
    UNROLL for (int x = 0; x < VEC; x++) {
      own[x] = UP(IN)(row_v.x[x]);
      sum[x] *= scale;
    }
    if (sizeof(IN) == 1) {
      const floats_t step = steps[c], offset = steps[width + c];
      UNROLL for (int x = 0; x < VEC; x++) {
        own[x] = __fadd_rn(own[x] * step.x[x], offset.x[x]);
        if (n) sum[x] = __fadd_rn(sum[x] * step.x[x], offset.x[x]);
      }
    }
    UNROLL for (int x = 0; x < VEC; x++) result.x[x] = DOWN(OUT)(padding ? 0.0f : own[x]);
    out[row * 2 * width + c] = result;
    UNROLL for (int x = 0; x < VEC; x++) result.x[x] = DOWN(OUT)(sum[x]);
    out[row * 2 * width + width + c] = result;
  }
}
