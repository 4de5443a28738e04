// A split: the edges of each type are a list of their own.
#ifndef TYPE
#define count_row count_list
#define pick_row pick_list
#else
#define NUM_TYPES (1 << 8 * sizeof(TYPE))

// Split the edges of the first type off `rest`, whose degree includes excluded edges and whose gaps
// are all of these -> the row to draw from; `one` is set to the hop as it is for this type.
FN row_t next_type(const spec_t *spec, const hop_t *hop, row_t *rest, hop_t *one) {
  const TYPE *types = (const TYPE *)spec->types + rest->start;
  i64 n = 1;
  BISECT(n, rest->degree - 1, types[at] <= types[0])
  row_t row = {rest->start, n};
  if (spec->edge_times) cut_by_time(&row, spec, rest->time);
  if (rest->num_gaps) exclude(&row, rest->gaps, rest->num_gaps);
  one->index = hop->index;
  one->k = spec->fanouts[hop->index * NUM_TYPES + types[0]];
  one->key = mix(hop->key ^ ((1ULL << 32) + types[0]));
  rest->start += n;
  rest->degree -= n;
  return row;
}
// How many edges of a row will be picked; NO_TYPE if one of its edges has a type without a fanout.
FN i64 count_row(const spec_t *spec, const hop_t *hop, const row_t *row) {
  row_t rest = *row;
  hop_t one;
  i64 count = 0;
  while (rest.degree) {
    row_t list = next_type(spec, hop, &rest, &one);
    if (one.k == NO_TYPE) return NO_TYPE;
    count += count_list(spec, &one, &list);
  }
  return count;
}
// Write the n = count_row() chosen positions in the graph's indices to out: type after type.
FN void pick_row(const spec_t *spec, const hop_t *hop, u64 v, const row_t *row, i64 n, i64 *out,
                double *scratch) {
  row_t rest = *row;
  hop_t one;
  while (n) {
    row_t list = next_type(spec, hop, &rest, &one);
    i64 count = count_list(spec, &one, &list);
    if (count) pick_list(spec, &one, v, &list, count, out, scratch);
    out += count;
    scratch += count;
    n -= count;
  }
}
#endif
