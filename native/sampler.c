// The C backend of the sampler; the docstring of sampler_cpu.py says when each pass runs. ID,
// HOME and WEIGHT are the types of node ids, of their hashes and of edge weights.
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include "rule.h"

#define ROWS 512     // destinations in a chunk
#define VECTOR_K 64  // the largest fanout drawn for many rows at a time
#define AHEAD 96     // prefetch distance in edges
#define THREADS 64   // at most
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MOST_EDGES ((i64)(~0ULL >> (65 - 8 * sizeof(ID))))  // of a block

// A slot of a hash table with open addressing; node -1: empty.
typedef struct {
  ID node, number;
} slot_t;

// With PAIRS a source is a pair of a node and a group: the index of its time among those of the
// batch, or with disjoint neighbourhoods the position of its seed.
#ifdef PAIRS
#define AT(groups, i) (groups)[i]
#else
#define AT(groups, i) 0
#endif

// The work on a hop of a batch.
typedef struct {
  spec_t spec;
  hop_t hop;
  const ID *dst;        // [S] destinations
  i64 *start, *degree;  // [S] start of a neighbour list in spec.indices, its length without gaps
  i64 *gap, *num_gaps;  // [S] its first index in excluded, and how many; if num_excluded > 0
  ID *offsets;          // [S+1] the block's indptr
  ID *local;            // [E] the block's indices: global ids until they are relabelled
  i64 *edges;           // [E] the block's edge_ids; null: not asked for
  void *edge_type;      // TYPE [E]
  ID *src;              // [S+E+1] the block's src_nodes
  ID *src_group;        // [S+E+1] groups of src; this and the next two with PAIRS only
  const ID *dst_group;  // [S]
  ID *edge_group;       // [E] that of an edge's destination
  HOME *edge_home;      // [E] home slot of an edge's source, if there is a table
  const i64 *times;     // [num_groups] of the batch
  const ID *seeds;      // [num_groups] if neighbourhoods are disjoint; else null
  const i64 *seeds_before;     // [num_groups + 1] how many seeds are of earlier groups, with PAIRS
  slot_t *table;               // [2^bits] local ids of nodes; null: no relabelling
  i64 S, N, bits, threads;     // N: nodes that have a local id so far
  const i64 *excluded;         // [num_excluded] edges, ascending
  const i64 *excluded_before;  // [1 + (M >> shift) + 1] number of excluded edges < i << shift
  i64 num_excluded, shift;
  i64 num_groups;
} job_t;
enum { NO_MEMORY = -1, DAMAGED = -2 };  // why a hop failed

typedef struct {         // of one thread, for `room` edges of a chunk
  i64 room, *positions;  // position of each edge in spec.indices
  double *best;          // for pick_list
} scratch_t;

// ---- sharing chunks among threads

typedef struct {
  job_t *job;
  int (*work)(job_t *, i64 chunk, scratch_t *);  // 0, or why it failed
  i64 chunks;
  atomic_llong next;  // the first chunk that no thread has taken
  atomic_int failed;
  atomic_char *done;  // [chunks]
} crew_t;

static int take_chunk(crew_t *crew, scratch_t *scratch) {
  i64 chunk = atomic_fetch_add(&crew->next, 1);
  if (chunk >= crew->chunks) return 0;
  int failure = crew->work(crew->job, chunk, scratch);
  if (failure) atomic_store(&crew->failed, failure);
  atomic_store(&crew->done[chunk], 1);
  return 1;
}
static void *take_chunks(void *crew) {
  scratch_t scratch = {0};
  while (take_chunk(crew, &scratch));
  free(scratch.positions);
  return 0;
}

// Run `work` on all chunks, in any order, on several threads. This thread passes finished chunks to
// `follow` (unless null) in order and, while the next one is unfinished, works like the others.
// -> 0, or why it failed. (Not by OpenMP: torch's own threads spin for a while after each parallel
// region, on the cores that these threads need.)
static int share_out(job_t *job, int (*work)(job_t *, i64, scratch_t *),
                     void (*follow)(job_t *, i64)) {
  crew_t crew = {.job = job, .work = work, .chunks = (job->S + ROWS - 1) / ROWS};
  scratch_t scratch = {0};
  pthread_t others[THREADS];
  i64 wanted = MIN(MIN(job->threads, THREADS), crew.chunks) - 1, started = 0;
  if (!(crew.done = calloc(crew.chunks + 1, 1))) return NO_MEMORY;
  // If a thread cannot be started, fewer do the work.
  while (started < wanted && !pthread_create(&others[started], 0, take_chunks, &crew)) started++;
  for (i64 chunk = 0; chunk < crew.chunks;) {
    if (atomic_load(&crew.done[chunk])) {
      if (follow && !atomic_load(&crew.failed)) follow(job, chunk);
      chunk++;
    } else if (!take_chunk(&crew, &scratch)) sched_yield();
  }
  while (started) pthread_join(others[--started], 0);
  free(scratch.positions);
  free((void *)crew.done);
  return crew.failed;
}

// ---- degrees and prefix sum

static inline i64 time_of(const job_t *job, i64 row) {
  return job->times[job->dst_group ? job->dst_group[row] : 0];
}

static inline hop_t hop_of(const job_t *job, i64 row) {
  hop_t hop = job->hop;
#ifdef PAIRS
  if (job->seeds) hop.key = mix(hop.key ^ (u64)job->seeds[job->dst_group[row]]);
#endif
  return hop;
}

static inline row_t row_of(const job_t *job, i64 row) {
  row_t list = {job->start[row], job->degree[row]};
  if (job->num_excluded) {
    list.gaps = job->excluded + job->gap[row];
    list.num_gaps = job->num_gaps[row];
    if (job->spec.types) list.degree += list.num_gaps;
  }
  if (job->spec.types && job->times) list.time = time_of(job, row);
  return list;
}

// Cut each list of a chunk after the last edge no later than its destination's time. Many lists are
// kept whole, as the time of their last edge tells. In the others a binary search is a chain of
// cache misses, so all searches of a chunk advance together, one step at a time.
static void cut_chunk_by_time(job_t *job, i64 first, i64 end) {
  // The edges of a list before `at` are early enough; the next `left` are undecided.
  i64 at[ROWS], left[ROWS];
  i64 latest[ROWS];       // the last time at which an edge is taken
  const i64 *times = job->spec.edge_times;
  int open[ROWS], n = 0;  // rows, counted from `first`, that are still searched
  for (i64 row = first; row < end; row++) {
    int i = (int)(row - first);
    i64 time = time_of(job, row), degree = job->degree[row];
    if (job->spec.strict && time == INT64_MIN) degree = 0;  // nothing comes before it
    latest[i] = (i64)((u64)time - (u64)job->spec.strict);
    int whole = !degree || times[job->start[row] + degree - 1] <= latest[i];
    at[i] = job->start[row] + (whole ? degree : 0);
    left[i] = whole ? 0 : degree - 1;  // the last edge is known to be too late
    if (!whole) __builtin_prefetch(&times[at[i] + left[i] / 2]);
    open[n] = i;
    n += left[i] > 0;
  }
  while (n) {
    int still_open = 0;
    for (int q = 0; q < n; q++) {
      int i = open[q];
      // `early` is a mask of all bits or none: a branch here would be mispredicted often, and then
      // wait for memory
      i64 half = left[i] >> 1, early = -(i64)(times[at[i] + half] <= latest[i]);
      at[i] += half + 1 & early;
      left[i] = half - (2 * half + 1 - left[i] & early);
      __builtin_prefetch(&times[at[i] + (left[i] >> 1)]);
      open[still_open] = i;
      still_open += left[i] > 0;
    }
    n = still_open;
  }
  for (i64 row = first; row < end; row++) {
    row_t list = {job->start[row], at[row - first] - job->start[row]};
    cut_by_window(&list, &job->spec, time_of(job, row));
    job->start[row] = list.start;
    job->degree[row] = list.degree;
  }
}

// Find the excluded edges of a chunk's lists. Few lists have any: for most a look at
// `excluded_before` is enough.
static void exclude_from_chunk(job_t *job, i64 first, i64 end) {
  for (i64 row = first; row < end; row++) {
    row_t list = {job->start[row], job->degree[row]};
    i64 low = job->excluded_before[list.start >> job->shift];
    i64 high = job->excluded_before[(list.start + list.degree >> job->shift) + 1];
    if (low < high) exclude(&list, job->excluded + low, high - low);
    job->degree[row] = list.degree;
    job->gap[row] = low < high ? list.gaps - job->excluded : 0;
    job->num_gaps[row] = list.num_gaps;
  }
}

static int count_chunk(job_t *job, i64 chunk, scratch_t *unused) {
  i64 first = chunk * ROWS, end = MIN(first + ROWS, job->S), signs = 0;
  const i64 *starts = job->spec.indptr;
  for (i64 row = first; row < end; row++) {
    __builtin_prefetch(&starts[job->dst[MIN(row + 32, end - 1)]]);
    i64 start = starts[job->dst[row]], next = starts[job->dst[row] + 1];
    job->start[row] = start;
    job->degree[row] = next - start;
    if (job->spec.edge_times) __builtin_prefetch(&job->spec.edge_times[next - 1]);
    signs |= start | next | (next - start) | (job->spec.M - next) | (INT32_MAX - (next - start));
  }
  // A list begins before 0, ends before it begins or after the last edge, or has 2^31 edges.
  if (signs < 0) return DAMAGED;
  if (job->spec.edge_times && !job->spec.types) cut_chunk_by_time(job, first, end);
  if (job->num_excluded) exclude_from_chunk(job, first, end);
  for (i64 row = first; row < end; row++) {
    FETCH_LIST(&job->spec, job->start[MIN(row + 8, end - 1)]);
    row_t list = row_of(job, row);
    hop_t hop = hop_of(job, row);
    i64 count = count_row(&job->spec, &hop, &list);
    // with fanouts by type it may not fit; then the sum does not either, and the hop is refused
    job->offsets[row + 1] = (ID)MIN(count, MOST_EDGES);
    signs |= count;
  }
  return signs < 0 ? DAMAGED : 0;
}

// Fill start, degree and offsets -> E, or why it failed.
i64 rb_count(job_t *job) {
  i64 E = 0;
  int failure = share_out(job, count_chunk, 0);
  if (failure) return failure;
  job->offsets[0] = 0;
  for (i64 row = 1; row <= job->S; row++) job->offsets[row] = (ID)(E += job->offsets[row]);
  return E;
}

// ---- the hash table of local ids

// The home slot of a node: where to look first. Nodes of a group share a window of the table:
// consecutive nodes are mostly of the same group, and then their slots are in the cache. The window
// of a group is twice the table's share that the group has of the seeds, so that neighbouring
// windows overlap: some seeds reach more nodes than others.
typedef struct {
  i64 bits, apart;
  const i64 *seeds_before;
} layout_t;
static layout_t layout_of(i64 bits, i64 num_groups, const i64 *seeds_before) {
  i64 apart = seeds_before ? (1LL << bits) / (seeds_before[num_groups] + 1) : 0;
  return (layout_t){bits, apart, seeds_before};
}
static inline u64 home(ID node, ID group, layout_t layout) {
  u64 hash = (u64)node * GOLDEN;
#ifdef PAIRS
  u64 start = (u64)(layout.seeds_before[group] * layout.apart);
  u64 window = (u64)(layout.seeds_before[group + 1] * layout.apart) - start;
  return (start + ((hash >> 32) * window >> 31)) & ((1ULL << layout.bits) - 1);
#else
  return hash >> (64 - layout.bits);
#endif
}

// The slot to try after `tries` slots taken by others: the next one, or after every eighth a random
// one of the whole table. This keeps searches short even if a group has more nodes than fit into
// its window.
static inline u64 next_slot(u64 at, u64 tries, ID node, ID group, layout_t layout) {
  if (tries % 8 == 0) at = mix((u64)node ^ mix((u64)group ^ tries << 40));
  else at++;
  return at & ((1ULL << layout.bits) - 1);
}

// Look up the local id of a node, of a group, from its home slot `at` on; a node without one gets
// `next`. Which it will be is unpredictable, so no branch depends on it.
static inline ID number_of(slot_t *table, u64 at, layout_t layout, const ID *src_group, ID node,
                           ID group, ID next) {
  slot_t slot = table[at];
  u64 tries = 1;
  while (__builtin_expect(
      slot.node != -1 && (slot.node != node || AT(src_group, slot.number) != group), 0)) {
    at = next_slot(at, tries++, node, group, layout);
    slot = table[at];
  }
  slot.number = slot.node == node ? slot.number : next;
  slot.node = node;
  table[at] = slot;
  return slot.number;
}

// ---- picks and gather

FLOYD(floyd_wide, uint32_t)
// Lists that floyd_wide() draws together: k edges of each, written to positions from `at` on.
typedef struct {
  i64 n, k, at[ROWS], start[ROWS];
  uint32_t degree[ROWS], picks[VECTOR_K][ROWS];
  u64 hash[ROWS];
} wide_t;
static void draw_wide(wide_t *wide, i64 *positions) {
  if (!wide->n) return;  // k is not set
  floyd_wide(wide->n, wide->k, wide->hash, wide->degree, wide->picks[0], ROWS);
  for (i64 i = 0; i < wide->n; i++)
    for (i64 pick = 0; pick < wide->k; pick++)
      positions[wide->at[i] + pick] = wide->start[i] + wide->picks[pick][i];
  wide->n = 0;
}
// Do pick_list() now, or add the list to `wide`, to be drawn with others.
static inline void pick_soon(wide_t *wide, const spec_t *spec, const hop_t *hop, u64 v,
                             const row_t *list, i64 n, i64 at, scratch_t *scratch) {
  int fits = POSITIONS && spec->rule == UNIFORM && n < list->degree && hop->k <= VECTOR_K && !list->num_gaps;
  if (!fits || (wide->n && hop->k != wide->k)) {
    if (n) pick_list(spec, hop, v, list, n, scratch->positions + at, scratch->best + at);
    return;
  }
  wide->k = hop->k;
  wide->at[wide->n] = at;
  wide->start[wide->n] = list->start;
  wide->degree[wide->n] = (uint32_t)list->degree;
  wide->hash[wide->n++] = mix(hop->key ^ v);
  if (wide->n == ROWS) draw_wide(wide, scratch->positions);
}

static int make_room(scratch_t *scratch, i64 edges) {  // nonzero: no memory
  if (edges <= scratch->room) return 0;
  free(scratch->positions);
  scratch->room = edges + edges / 4;
  scratch->positions = malloc(scratch->room * (sizeof(i64) + sizeof(double)));
  scratch->best = (double *)(scratch->positions + scratch->room);
  if (!scratch->positions) scratch->room = 0;
  return !scratch->positions;
}

// Whether all ids are nodes of the graph. They will be used as indices, and damage on disk must not
// crash the process. A separate pass, over a chunk in the cache, because the compiler can vectorize
// it, unlike the gather.
static int within(const ID *nodes, i64 n, i64 V) {
  ID least = 0, most = 0;
  for (i64 i = 0; i < n; i++) {
    least = MIN(least, nodes[i]);
    most = nodes[i] > most ? nodes[i] : most;
  }
  return least >= 0 && most < V;
}

static int pick_chunk(job_t *job, i64 chunk, scratch_t *scratch) {
  i64 first = chunk * ROWS, end = MIN(first + ROWS, job->S);
  i64 base = job->offsets[first], E = job->offsets[end] - base;  // this chunk's edges in the block
  if (make_room(scratch, E)) return NO_MEMORY;
  i64 *positions = scratch->positions;
  wide_t wide;
  wide.n = 0;
  for (i64 row = first; row < end; row++) {
    FETCH_LIST(&job->spec, job->start[MIN(row + 8, end - 1)]);
    u64 v = (u64)job->dst[row];
    i64 at = job->offsets[row] - base, count = job->offsets[row + 1] - job->offsets[row];
    row_t list = row_of(job, row);
    hop_t hop = hop_of(job, row);
#ifdef TYPE
    hop_t one;
    row_t rest = list;
    for (i64 last = at + count, n; at < last; at += n) {
      list = next_type(&job->spec, &hop, &rest, &one);
      n = count_list(&job->spec, &one, &list);
      pick_soon(&wide, &job->spec, &one, v, &list, n, at, scratch);
    }
#else
    pick_soon(&wide, &job->spec, &hop, v, &list, count, at, scratch);
#endif
  }
  draw_wide(&wide, positions);

  for (i64 e = 0; e < E; e++) {  // gather
    __builtin_prefetch(&job->spec.indices[positions[MIN(e + AHEAD, E - 1)]]);
    job->local[base + e] = job->spec.indices[positions[e]];
  }
  if (!within(job->local + base, E, job->spec.V)) return DAMAGED;
#ifdef TYPE
  for (i64 e = 0; e < E; e++)
    ((TYPE *)job->edge_type)[base + e] = ((const TYPE *)job->spec.types)[positions[e]];
#endif
#ifdef PAIRS
  for (i64 row = first; row < end; row++)
    for (i64 e = job->offsets[row]; e < job->offsets[row + 1]; e++)
      job->edge_group[e] = job->dst_group[row];
#endif
  if (job->table) {
    layout_t layout = layout_of(job->bits, job->num_groups, job->seeds_before);
    for (i64 e = base; e < base + E; e++)
      job->edge_home[e] = (HOME)home(job->local[e], AT(job->edge_group, e), layout);
  }
  if (job->edges && E) memcpy(job->edges + base, positions, sizeof(i64) * E);
  return 0;
}

// ---- relabel

static void relabel_chunk(job_t *job, i64 chunk) {
  i64 first = job->offsets[chunk * ROWS], end = job->offsets[MIN((chunk + 1) * ROWS, job->S)];
  ID *local = job->local, *src = job->src, next = (ID)job->N;
  const HOME *at = job->edge_home;
  slot_t *table = job->table;
  layout_t layout = layout_of(job->bits, job->num_groups, job->seeds_before);
  for (i64 e = first; e < end; e++) {
    __builtin_prefetch(&table[at[MIN(e + AHEAD, end - 1)]], 1);
    ID node = local[e], group = AT(job->edge_group, e);
    local[e] = number_of(table, at[e], layout, job->src_group, node, group, next);
    src[next] = node;  // if it is not new, the next node overwrites it
#ifdef PAIRS
    job->src_group[next] = group;
#endif
    next += local[e] == next;
  }
  job->N = next;
}

// The fused part of a hop: all threads pick and gather, chunk after chunk, and this one relabels
// behind them. The hop before left the destinations in the table, numbered 0 .. S-1; so `src`
// begins with them, and each new id is added to both. Sampling first and building the block
// afterwards would write all edges to memory, read them again, and look up destinations too.
// Without a table `local` keeps global ids. -> N, or why it failed.
i64 rb_pick(job_t *job) {
  job->N = job->S;
  if (job->table && job->S) memcpy(job->src, job->dst, sizeof(ID) * job->S);
  if (job->src_group && job->S) memcpy(job->src_group, job->dst_group, sizeof(ID) * job->S);
  int failure = share_out(job, pick_chunk, job->table ? relabel_chunk : 0);
  return failure ? failure : job->N;
}

// Empty a table and number n distinct nodes in it 0 .. n-1 -> the position of a repeated node, or
// -1. group: [n] or null.
i64 rb_number(slot_t *table, i64 bits, i64 num_groups, const i64 *seeds_before, const ID *nodes,
              const ID *group, i64 n) {
  layout_t layout = layout_of(bits, num_groups, seeds_before);
  memset(table, 0xff, sizeof(slot_t) << bits);
  for (i64 i = 0; i < n; i++) {
    i64 ahead = MIN(i + AHEAD, n - 1);
    __builtin_prefetch(&table[home(nodes[ahead], AT(group, ahead), layout)], 1);
    u64 at = home(nodes[i], AT(group, i), layout);
    if (number_of(table, at, layout, group, nodes[i], AT(group, i), (ID)i) != (ID)i) return i;
  }
  return -1;
}

// Advise huge pages, for fewer TLB misses under random access; the kernel may ignore it.
void rb_huge_pages(void *memory, i64 bytes) {
#ifdef MADV_HUGEPAGE
  uintptr_t page = 4096, address = (uintptr_t)memory;
  uintptr_t first = (address + page - 1) / page * page, end = (address + bytes) / page * page;
  if (first < end) madvise((void *)first, end - first, MADV_HUGEPAGE);
#endif
}
