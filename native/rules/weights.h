// Draws by weight, the rule's column: the n edges with the largest log(uniform) / weight
// (Efraimidis-Spirakis). Edges of weight 0 are never drawn.
#define POSITIONS 0
#define FETCH_LIST(spec, start) __builtin_prefetch(&weights_of(spec)[start])
FN const WEIGHT *weights_of(const spec_t *spec) { return (const WEIGHT *)spec->column; }

FN i64 count_list(const spec_t *spec, const hop_t *hop, const row_t *row) {
  i64 count = 0, gap = 0, edge = row->start;
  for (i64 place = 0; place < row->degree && count != hop->k; place++, edge++) {
    edge = not_excluded(row, edge, &gap);
    count += weights_of(spec)[edge] > 0;
  }
  return count;
}
// The edges are in stored order; best [n] is scratch. The best so far are kept sorted, which for
// usual fanouts is cheaper than a heap; of equal keys the earlier edge wins.
FN void pick_list(const spec_t *spec, const hop_t *hop, u64 v, const row_t *row, i64 n, i64 *out,
                  double *best) {
  i64 found = 0, gap = 0, edge = row->start;
  int all = hop->k < 0 || n < hop->k;
  for (i64 place = 0; place < row->degree; place++, edge++) {
    edge = not_excluded(row, edge, &gap);
    double weight = weights_of(spec)[edge];
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
