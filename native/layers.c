// The layers' steps for the CPU, on OpenMP threads: rows of type IN, results of type OUT (float or
// bf16), integers ID. S destinations, N sources, E edges of a block; F, D widths.
#include <stdint.h>
#include <string.h>
#include <omp.h>
#include "base.h"
#define COLUMNS 1024  // of a row handled at a time, in registers and first-level cache

// out [S, 2F]: own row beside the mean of the neighbours' rows of h [N, F].
void self_and_mean(const ID *indptr, const ID *indices, const IN *h, const ID *self_rows, i64 S,
                   i64 F, OUT *out) {
#pragma omp parallel for schedule(dynamic, 256)
  for (i64 s = 0; s < S; s++) {
    const IN *own = h + (self_rows ? (i64)self_rows[s] : s) * F;
    i64 first = indptr[s], last = indptr[s + 1], soon = s + 2 < S ? s + 2 : s;
    float scale = last > first ? 1.0f / (float)(last - first) : 0.0f, sum[COLUMNS];
    // The rows of a later one are on their way to the cache while this one is summed.
    i64 soon_own = self_rows ? (i64)self_rows[soon] : soon;
    for (i64 e = indptr[soon] - 1; e < indptr[soon + 1]; e++) {
      const IN *row = h + (e < indptr[soon] ? soon_own : (i64)indices[e]) * F;
      for (i64 c = 0; c < F && c < COLUMNS; c += 64 / sizeof(IN)) __builtin_prefetch(row + c);
    }
    for (i64 at = 0; at < F; at += COLUMNS) {
      i64 n = F - at < COLUMNS ? F - at : COLUMNS;
      memset(sum, 0, sizeof(float) * n);
      for (i64 e = first; e < last; e++) {
        const IN *row = h + (i64)indices[e] * F + at;
        for (i64 c = 0; c < n; c++) sum[c] += UP(IN)(row[c]);
      }
      for (i64 c = 0; c < n; c++) out[2 * F * s + at + c] = DOWN(OUT)(UP(IN)(own[at + c]));
      for (i64 c = 0; c < n; c++) out[2 * F * s + F + at + c] = DOWN(OUT)(sum[c] * scale);
    }
  }
}

// Rows ids [n] of h [V, F] -> how many ids are out of range. Some fifty cache lines are on their
// way.
i64 gather_rows(const IN *h, const ID *ids, i64 n, i64 V, i64 F, IN *out) {
  const i64 row = F * sizeof(IN), ahead = 4 + 3072 / (row + 1);
  i64 bad = 0;
#pragma omp parallel for schedule(static) reduction(+ : bad)
  for (i64 a = 0; a < n; a += 256) {
    for (i64 i = a; i < n && i < a + 256; i++) {
      const char *soon = (const char *)(h + (i64)ids[i + ahead < n ? i + ahead : i] * F);
      for (i64 c = 0; c < row; c += 64) __builtin_prefetch(soon + c);
      __builtin_prefetch(soon + row - 1);
      if ((u64)(i64)ids[i] < (u64)V) memcpy(out + i * F, h + (i64)ids[i] * F, row);
      else bad++;
    }
  }
  return bad;
}

// grad [S, 2F] -> total [N, F]. Threads share out the columns, so that no two write to one
// place.
void self_and_mean_grad(const ID *indptr, const ID *indices, const IN *grad, i64 S, i64 N, i64 F,
                        float *total) {
#pragma omp parallel
  {
    i64 threads = omp_get_num_threads(), t = omp_get_thread_num(), a = F * t / threads,
        b = F * (t + 1) / threads;
    for (i64 s = 0; s < S; s++)
      for (i64 c = a; c < b; c++) total[F * s + c] = UP(IN)(grad[2 * F * s + c]);
    for (i64 s = S; s < N; s++) memset(total + F * s + a, 0, sizeof(float) * (b - a));
    for (i64 s = 0; s < S; s++) {
      float scale = 1.0f / (float)(indptr[s + 1] - indptr[s]);
      for (i64 e = indptr[s]; e < indptr[s + 1]; e++) {
        float *row = total + F * (i64)indices[e];
        for (i64 c = a; c < b; c++) row[c] += UP(IN)(grad[2 * F * s + F + c]) * scale;
      }
    }
  }
}

// Eight columns of a row share one 64-bit draw of splitmix64, a byte each: dropped when below
// `drop`.
void relu_dropout(IN *h, const ID *nodes, i64 S, i64 D, u64 seed, int drop, float scale) {
#pragma omp parallel for schedule(static)
  for (i64 s = 0; s < S; s++) {
    IN *row = h + D * s;
    if (!drop) {
      for (i64 c = 0; c < D; c++) row[c] = UP(IN)(row[c]) > 0 ? row[c] : DOWN(IN)(0.0f);
      continue;
    }
    u64 key = mix(seed ^ (u64)(nodes ? (i64)nodes[s] : s));
    for (i64 c = 0; c < D; c += 8) {
      u64 z = finalise(key + (u64)c / 8 * GOLDEN);
      unsigned char bytes[8];
      for (int b = 0; b < 8; b++) bytes[b] = (unsigned char)(z >> 8 * b);
      for (i64 b = 0, m = D - c < 8 ? D - c : 8; b < m; b++) {
        float x = UP(IN)(row[c + b]);
        row[c + b] = DOWN(IN)(bytes[b] >= drop && x > 0 ? x * scale : 0.0f);
      }
    }
  }
}
void relu_dropout_grad(const IN *h, const IN *grad, i64 n, float scale, OUT *out) {
#pragma omp parallel for schedule(static)
  for (i64 i = 0; i < n; i++) out[i] = DOWN(OUT)(UP(IN)(h[i]) > 0 ? UP(IN)(grad[i]) * scale : 0.0f);
}
