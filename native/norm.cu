// Layer norm, ReLU and dropout of rows [S, WIDTH] of x or, unless residual is null, of their sums, in one
// pass over memory each way; for a GPU. Threads of a warp share a row: each keeps VECTORS vectors
// of it in registers.
#include "dropout.h"
#define VECTORS ((WIDTH + COLUMNS * WARP - 1) / (COLUMNS * WARP))
#define parts ((WIDTH + COLUMNS - 1) / COLUMNS)
#define left (WIDTH - column)
// Each vector j of a thread that is in the row, from `column` on.
#define EACH_VECTOR                                                                            \
  UNROLL for (int j = 0, column = lane * COLUMNS; j < VECTORS; j++, column += WARP * COLUMNS) \
    if (column < WIDTH)

FN floats_t in_row(floats_t v, int column) {
  if (WIDTH % COLUMNS) EACH v[q] = q < left ? v[q] : 0;
  return v;
}
FN floats_t load_sum(const IN *x, const IN *residual, i64 at, int whole, int column) {
  const floats_t v = load(x + at, whole, left);
  return residual ? v + load(residual + at, whole, left) : v;
}

// moments [S, 2]: mean and reciprocal standard deviation; kept: the bits of the results.
KERNEL norm_relu(const IN *x, const IN *residual, const float *gamma, const float *beta, int S,
                 int whole, float eps, const ID *nodes, int drop, float scale, i64 seed,
                 const i64 *step, i64 layer, float *moments, kept_t *kept, OUT *out) {
  THREAD((i64)S * WARP);
  const i64 row = (unsigned)i / WARP, node = NODE_OF(row);
  const int lane = (int)((unsigned)i % WARP);
  floats_t v[VECTORS], sum = all_of(0), squares = all_of(0);
  EACH_VECTOR {
    v[j] = load_sum(x, residual, row * WIDTH + column, whole, column);
    sum = sum + v[j];
  }
  const float mean = sum_of_warp(total(sum)) / WIDTH;
  EACH_VECTOR {
    v[j] = in_row(v[j] + all_of(-mean), column);
    squares = squares + v[j] * v[j];
  }
  const float by = 1 / sqrtf(sum_of_warp(total(squares)) / WIDTH + eps);
  if (!lane) {
    moments[2 * row] = mean;
    moments[2 * row + 1] = by;
  }
  const u64 layer_seed = LAYER_SEED;
  EACH_VECTOR {
    const floats_t g = load_floats(gamma + column, whole, left);
    const floats_t y = v[j] * by * g + load_floats(beta + column, whole, left);
    v[j] = activate(y, 1, node, column, drop, scale, layer_seed);
    store(out + row * WIDTH + column, whole, left, v[j]);
    KEEP_BITS(row, v[j]);
  }
}

// grad -> the gradient of x and of residual. Each of `runs` warps has `run` rows; sums [runs, 2,
// WIDTH] gets, over these, the gradients of gamma and of beta.
KERNEL norm_relu_grad(const IN *x, const IN *residual, const IN *grad, const float *gamma,
                      const float *moments, const kept_t *kept, int S, int whole, float scale,
                      int runs, int run, float *sums, OUT *out) {
  THREAD((i64)runs * WARP);
  const i64 part = (unsigned)i / WARP;
  const int lane = (int)((unsigned)i % WARP);
  floats_t to_gamma[VECTORS], to_beta[VECTORS];
  UNROLL for (int j = 0; j < VECTORS; j++) to_gamma[j] = to_beta[j] = all_of(0);
  for (i64 row = part * run; row < S && row < (part + 1) * run; row++) {
    const float mean = moments[2 * row], by = moments[2 * row + 1];
    floats_t v[VECTORS], g[VECTORS], sum = all_of(0), products = all_of(0);
    EACH_VECTOR {
      const i64 at = row * WIDTH + column;
      v[j] = load_sum(x, residual, at, whole, column);
      g[j] = keep(WHERE_KEPT(row), load(grad + at, whole, left), scale);
    }
    EACH_VECTOR {
      v[j] = (v[j] + all_of(-mean)) * by;
      to_gamma[j] = to_gamma[j] + g[j] * v[j];
      to_beta[j] = to_beta[j] + g[j];
      g[j] = g[j] * load_floats(gamma + column, whole, left);
      sum = sum + g[j];
      products = products + g[j] * v[j];
    }
    const float shift = sum_of_warp(total(sum)) / -WIDTH;
    const float slope = sum_of_warp(total(products)) / -WIDTH;
    EACH_VECTOR {
      g[j] = (g[j] + all_of(shift) + v[j] * slope) * by;
      store(out + row * WIDTH + column, whole, left, g[j]);
    }
  }
  EACH_VECTOR {
    float *to = sums + 2 * part * WIDTH + column;
    store_floats(to, whole, left, to_gamma[j]);
    store_floats(to + WIDTH, whole, left, to_beta[j]);
  }
}
