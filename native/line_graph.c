// The line graph of a batch of small graphs: pairs of bonds u -> v and v -> w, whose angle at v a model sees. Called by
// extras/graphs.py.
#include <stdint.h>

typedef int64_t i64;

// Whether one bond leads back over the other. In a crystal two bonds may join the same two atoms, through different
// faces of the cell, so the vectors decide; rounding is far below a thousandth of a bond.
static int opposite(const float *a, const float *b) {
  float apart = 0, length = 0;
  for (int j = 0; j < 3; j++) {
    apart += (a[j] + b[j]) * (a[j] + b[j]);
    length += a[j] * a[j];
  }
  return apart <= 1e-6f * length;
}

// List the pairs in first and second, which have room for all, bonds back included, by second bond -> their number.
i64 bond_pairs(const int *indptr, const int *indices, i64 nodes, const float *vectors, int *first, int *second) {
  i64 count = 0;
  for (int w = 0; w < nodes; w++)
    for (int b = indptr[w]; b < indptr[w + 1]; b++) {
      const int v = indices[b];
      for (int a = indptr[v]; a < indptr[v + 1]; a++) {
        if (indices[a] == w && opposite(vectors + 3 * (i64)a, vectors + 3 * (i64)b)) continue;
        first[count] = a;
        second[count++] = b;
      }
    }
  return count;
}
