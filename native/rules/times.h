// A cut: a node sees the edges no later than its time.

// How many of the sorted times are <= time or, if strict, < time.
FN i64 number_before(const i64 *times, i64 n, i64 time, int strict) {
  i64 none_later = (i64)(~0ULL >> 1);
  if (strict) return lower_bound(times, n, time);
  return time == none_later ? n : lower_bound(times, n, time + 1);
}
// Cut a row to the edges whose time is > `time` - window, if there is a window.
FN void cut_by_window(row_t *row, const spec_t *spec, i64 time) {
  i64 since = (i64)((u64)time - (u64)spec->window);
  if (!spec->window || since > time) return;  // since > time: it wrapped around, all are later
  i64 early = number_before(spec->edge_times + row->start, row->degree, since, 0);
  row->start += early;
  row->degree -= early;
}
// Cut a row to the edges whose time is <= `time` or, if strict, < `time`, and by the window.
FN void cut_by_time(row_t *row, const spec_t *spec, i64 time) {
  const i64 *times = spec->edge_times + row->start;
  row->degree = number_before(times, row->degree, time, (int)spec->strict);
  cut_by_window(row, spec, time);
}
