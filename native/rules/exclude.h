// A cut: edges of a batch that are left out, as if the graph did not have them.

// Exclude from a row those of the sorted edge ids that are in it.
FN void exclude(row_t *row, const i64 *edges, i64 n) {
  i64 before = lower_bound(edges, n, row->start);
  row->gaps = edges + before;
  row->num_gaps = lower_bound(row->gaps, n - before, row->start + row->degree);
  row->degree -= row->num_gaps;
}
// The edge at a place of a row, counted without the excluded edges.
FN i64 edge_at(const row_t *row, i64 place) {
  i64 low = 0;  // excluded edges before it
  BISECT(low, row->num_gaps, row->gaps[at] - at <= row->start + place)
  return row->start + place + low;
}
// The first edge from `edge` on that is not excluded; moves `gap` past those that are.
FN i64 not_excluded(const row_t *row, i64 edge, i64 *gap) {
  for (; *gap < row->num_gaps && row->gaps[*gap] == edge; ++*gap) edge++;
  return edge;
}
