// LABOR-0 (arXiv 2210.13339): an edge is kept by a draw of its source, which all destinations share.
#define POSITIONS 0
#define FETCH_LIST(spec, start) __builtin_prefetch(&(spec)->indices[start])

FN int keeps(const spec_t *spec, const hop_t *hop, i64 edge, i64 degree) {
  u64 limit = (u64)hop->k << 32;
  return hop->k < 0 || draw(hop->key, (u64)spec->indices[edge], 0) * (u64)degree <= limit;
}
FN i64 count_list(const spec_t *spec, const hop_t *hop, const row_t *row) {
  i64 count = 0, gap = 0, edge = row->start;
  for (i64 place = 0; place < row->degree; place++, edge++) {
    edge = not_excluded(row, edge, &gap);
    count += keeps(spec, hop, edge, row->degree);
  }
  return count;
}
FN void pick_list(const spec_t *spec, const hop_t *hop, u64 v, const row_t *row, i64 n, i64 *out,
                  double *scratch) {
  i64 gap = 0, edge = row->start;
  for (i64 place = 0; place < row->degree; place++, edge++) {
    edge = not_excluded(row, edge, &gap);
    if (keeps(spec, hop, edge, row->degree)) *out++ = edge;
  }
}
