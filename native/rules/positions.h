// Rules that draw positions in a list, which they do not read: uniform, with replacement, the latest.
#define POSITIONS 1
#define FETCH_LIST(spec, start) (void)0

FN i64 count_list(const spec_t *spec, const hop_t *hop, const row_t *row) {
  if (spec->rule == REPLACE) return row->degree ? hop->k : 0;
  return hop->k < 0 || row->degree < hop->k ? row->degree : hop->k;
}

FLOYD(floyd, i64)

FN void pick_list(const spec_t *spec, const hop_t *hop, u64 v, const row_t *row, i64 n, i64 *out,
                  double *scratch) {
  i64 degree = row->degree;
  u64 hash = mix(hop->key ^ v);
  if (spec->rule == REPLACE)
    for (i64 i = 0; i < n; i++) out[i] = below(mix(hash ^ (u64)i) >> 32, degree);
  else if (spec->rule == LATEST || n == degree)
    for (i64 i = 0; i < n; i++) out[i] = degree - n + i;
  else floyd(1, n, &hash, &degree, out, 1);
  for (i64 i = 0; i < n; i++) out[i] = edge_at(row, out[i]);
}
