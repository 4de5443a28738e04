"""The CPU backend of sampler.py: C code that samples a hop and builds its block, compiled at first use.

Copy this file and native.py beside sampler.py, which hands it the law (what is drawn); here is how: the five passes of
sampler.py's first lines, and when they run.

All passes wait for memory, not for arithmetic: a degree is one random read of indptr, a pick's id one of indices, its
number one of the hash table, each a cache miss in a large graph. A loop that reads, waits and goes on has one miss in
flight. So every loop here asks for a line long before its turn (`__builtin_prefetch`, for edges AHEAD = 96 of them),
and tens of misses are in flight at a time; that is most of this file's speed.

Destinations are handled in chunks of 512, which threads take one after the other, whoever is free:

    this thread      count 0, 2, 3 ...  | prefix | pick 0 | relabel 0 | pick 2 | relabel 1, 2 | pick 5 | relabel 3 ...
    other threads    count 1, 4 ...     |  sum   | pick 1      | pick 3        | pick 4       | pick 6      | ...

`count` reads degrees; the prefix sum of what each row will have says where its edges stand and how much memory the
block takes; `pick` draws places and gathers the ids there; `relabel` replaces ids by numbers. The last two are fused:
a chunk is relabelled while its edges are still in the cache and the others are busy with the chunks after it.

One thread relabels, in the order of the edges, because a node's number is the count of distinct nodes before it. That
makes `src_nodes` the same for any number of threads, and the table needs no locks or atomics. It keeps up: a slot of
the table is one miss, like the id that a pick gathers, and it helps with picking whenever no chunk is ready.
"""

import ctypes
import functools

import native
import torch

INCLUDES = r"""
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#define FN static inline
"""

# The law of sampler.py stands between these two.

PASSES = r"""
#define ROWS 512      // destinations in a chunk
#define VECTOR_K 64   // the largest fanout that is drawn for a chunk's rows side by side
#define AHEAD 96      // edges: how early memory is asked for
#define THREADS 64    // at most
#define MIN(a, b) ((a) < (b) ? (a) : (b))

typedef struct { ID node, number; } slot_t;  // of a hash table with open addressing; node -1: empty

typedef struct {        // one hop of a batch; Job in Python
  hop_t hop;            // the graph, and what to draw
  const ID *dst;        // [S] destinations
  i64 *start, *degree;  // [S] where a destination's neighbour list begins in hop.indices, and its length
  ID *offsets;          // [S+1] the block's indptr
  ID *local;            // [E] the block's indices: global ids until they are relabelled
  i64 *edges;           // [E] the block's edge_ids; null: not asked for
  ID *src;              // [S+E+1] the block's src_nodes
  slot_t *table;        // [2^bits] numbers of nodes; null: no relabelling
  i64 S, N, bits, threads;  // N: nodes that have a number so far
} job_t;

typedef struct { i64 room, *positions; double *keys; } scratch_t;  // of one thread: for the edges of a chunk

// ---- sharing out chunks

typedef struct {
  job_t *job;
  int (*work)(job_t *, i64 chunk, scratch_t *);  // nonzero: no memory
  i64 chunks;
  atomic_llong next;    // the first chunk that nobody has taken
  atomic_int failed;
  atomic_char *done;    // [chunks]
} crew_t;

static int take_chunk(crew_t *crew, scratch_t *scratch) {
  i64 chunk = atomic_fetch_add(&crew->next, 1);
  if (chunk >= crew->chunks) return 0;
  if (crew->work(crew->job, chunk, scratch)) atomic_store(&crew->failed, 1);
  atomic_store(&crew->done[chunk], 1);
  return 1;
}
static void *take_chunks(void *crew) {
  scratch_t scratch = {0};
  while (take_chunk(crew, &scratch));
  free(scratch.positions);
  return 0;
}

// `work` on all chunks, in any order and on several threads. This thread hands finished chunks to `follow` (or null) in
// their order; while the next one is not finished, it works as the others do. -> nonzero without memory.
// (No OpenMP: torch's own threads spin for a while after each parallel region, on the cores that these threads need.)
static int share_out(job_t *job, int (*work)(job_t *, i64, scratch_t *), void (*follow)(job_t *, i64)) {
  crew_t crew = {.job = job, .work = work, .chunks = (job->S + ROWS - 1) / ROWS};
  scratch_t scratch = {0};
  pthread_t others[THREADS];
  i64 wanted = MIN(MIN(job->threads, THREADS), crew.chunks) - 1, started = 0;
  if (!(crew.done = calloc(crew.chunks + 1, 1))) return -1;
  while (started < wanted && !pthread_create(&others[started], 0, take_chunks, &crew)) started++;  // fewer do as well
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

static int count_chunk(job_t *job, i64 chunk, scratch_t *unused) {
  i64 first = chunk * ROWS, end = MIN(first + ROWS, job->S);
  for (i64 row = first; row < end; row++) {
    __builtin_prefetch(&job->hop.indptr[job->dst[MIN(row + 32, end - 1)]]);
    const i64 *list = &job->hop.indptr[job->dst[row]];
    job->start[row] = list[0];
    job->degree[row] = list[1] - list[0];
  }
  for (i64 row = first; row < end; row++) {
    if (job->hop.mode == LABOR) __builtin_prefetch(&job->hop.indices[job->start[MIN(row + 4, end - 1)]]);
    job->offsets[row + 1] = (ID)count_row(&job->hop, job->start[row], job->degree[row]);
  }
  return 0;
}

i64 rb_count(job_t *job) {  // fills start, degree, offsets -> E, or -1 without memory
  i64 E = 0;
  if (share_out(job, count_chunk, 0)) return -1;
  job->offsets[0] = 0;
  for (i64 row = 1; row <= job->S; row++) job->offsets[row] = (ID)(E += job->offsets[row]);
  return E;
}

// ---- picks and gather

// Floyd for n rows side by side, in vector registers: picks[i][row] is draw i of a row, hash = mix(key ^ v), k < degree.
static void floyd(i64 n, i64 k, const u64 *restrict hash, const uint32_t *restrict degree,
                  uint32_t (*restrict picks)[ROWS]) {
  uint32_t taken[ROWS];
  for (i64 i = 0; i < k; i++) {
    uint32_t *restrict pick = picks[i];
    for (i64 row = 0; row < n; row++) {
      pick[row] = (uint32_t)below(mix(hash[row] ^ (u64)i) >> 32, degree[row] - k + i + 1);
      taken[row] = 0;
    }
    for (i64 earlier = 0; earlier < i; earlier++)
      for (i64 row = 0; row < n; row++) taken[row] |= picks[earlier][row] == pick[row];
    for (i64 row = 0; row < n; row++) pick[row] = taken[row] ? (uint32_t)(degree[row] - k + i) : pick[row];
  }
}

static int pick_chunk(job_t *job, i64 chunk, scratch_t *scratch) {
  i64 first = chunk * ROWS, end = MIN(first + ROWS, job->S), k = job->hop.k, n = 0;
  i64 base = job->offsets[first], E = job->offsets[end] - base;
  uint32_t rows[ROWS], degree[ROWS], picks[VECTOR_K][ROWS];  // n rows that are drawn side by side
  u64 hash[ROWS];
  if (scratch->room < E) {
    free(scratch->positions);
    scratch->room = E + E / 4;
    scratch->positions = malloc(scratch->room * (sizeof(i64) + sizeof(double)));
    scratch->keys = (double *)(scratch->positions + scratch->room);
    if (!scratch->positions) return scratch->room = 0, -1;
  }
  i64 *positions = scratch->positions;
  for (i64 row = first; row < end; row++) {
    u64 v = (u64)job->dst[row];
    i64 at = job->offsets[row] - base, count = job->offsets[row + 1] - job->offsets[row];
    if (job->hop.mode == UNIFORM && count < job->degree[row] && k <= VECTOR_K) {
      rows[n] = (uint32_t)row;
      degree[n] = (uint32_t)job->degree[row];
      hash[n++] = mix(job->hop.key ^ v);
    } else {
      pick_row(&job->hop, v, job->start[row], job->degree[row], count, positions + at, scratch->keys + at);
    }
  }
  if (n) floyd(n, k, hash, degree, picks);
  for (i64 i = 0; i < n; i++) {
    i64 *out = positions + job->offsets[rows[i]] - base;
    for (i64 q = 0; q < k; q++) out[q] = job->start[rows[i]] + picks[q][i];
  }
  for (i64 e = 0; e < E; e++) {
    __builtin_prefetch(&job->hop.indices[positions[MIN(e + AHEAD, E - 1)]]);
    job->local[base + e] = job->hop.indices[positions[e]];
  }
  if (job->edges && E) memcpy(job->edges + base, positions, sizeof(i64) * E);
  return 0;
}

// ---- relabel

static inline u64 home(ID node, i64 bits) { return (u64)node * 0x9e3779b97f4a7c15ULL >> (64 - bits); }

// The number of a node, which is `next` if it had none. Whether it had is as good as random: nothing branches on it.
static inline ID number_of(slot_t *table, i64 bits, ID node, ID next) {
  u64 at = home(node, bits);
  slot_t slot = table[at];
  while (__builtin_expect(slot.node != node && slot.node != -1, 0)) {
    at = (at + 1) & ((1ULL << bits) - 1);
    slot = table[at];
  }
  slot.number = slot.node == node ? slot.number : next;
  slot.node = node;
  table[at] = slot;
  return slot.number;
}

static void relabel_chunk(job_t *job, i64 chunk) {
  i64 first = job->offsets[chunk * ROWS], end = job->offsets[MIN((chunk + 1) * ROWS, job->S)];
  ID *local = job->local, *src = job->src, next = (ID)job->N;
  for (i64 e = first; e < end; e++) {
    __builtin_prefetch(&job->table[home(local[MIN(e + AHEAD, end - 1)], job->bits)], 1);
    ID node = local[e];
    local[e] = number_of(job->table, job->bits, node, next);
    src[next] = node;  // if it is not new, the next node is written over it
    next += local[e] == next;
  }
  job->N = next;
}

// The fused part of a hop: threads pick and gather chunk after chunk, this one relabels behind them. `table` holds the
// destinations with numbers 0 .. S-1, so they open `src`, and every id that is met for the first time is added to both.
// Without a table, `local` keeps global ids. -> N, or -1 without memory.
i64 rb_pick(job_t *job) {
  job->N = job->S;
  if (job->table && job->S) memcpy(job->src, job->dst, sizeof(ID) * job->S);
  return share_out(job, pick_chunk, job->table ? relabel_chunk : 0) ? -1 : job->N;
}

// Empty a table and number n distinct nodes in it 0 .. n-1 -> the position of a repeated one, or -1.
i64 rb_number(slot_t *table, i64 bits, const ID *nodes, i64 n) {
  memset(table, 0xff, sizeof(slot_t) << bits);
  for (i64 i = 0; i < n; i++) {
    __builtin_prefetch(&table[home(nodes[MIN(i + AHEAD, n - 1)], bits)], 1);
    if (number_of(table, bits, nodes[i], (ID)i) != (ID)i) return i;
  }
  return -1;
}

void rb_huge_pages(void *memory, i64 bytes) {  // fewer TLB misses under random access; advice, may be ignored
#ifdef MADV_HUGEPAGE
  uintptr_t page = 4096, first = ((uintptr_t)memory + page - 1) / page * page, end = ((uintptr_t)memory + bytes) / page * page;
  if (first < end) madvise((void *)first, end - first, MADV_HUGEPAGE);
#endif
}
"""


class Job(ctypes.Structure):
    """job_t of the C code, whose first six fields are hop_t of the law."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("indptr", "indices", "weights")),
        *((name, ctypes.c_int64) for name in ("mode", "k")),
        ("key", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("dst", "start", "degree", "offsets", "local", "edges", "src", "table")),
        *((name, ctypes.c_int64) for name in ("S", "N", "bits", "threads")),
    ]


FLAGS = ["-O3", "-march=native", "-fPIC", "-shared", "-pthread"]
TYPES = {torch.int32: "int32_t", torch.int64: "int64_t", torch.float32: "float", torch.float64: "double"}
SIGNATURES = {
    "rb_count": (ctypes.c_int64, ctypes.POINTER(Job)),
    "rb_pick": (ctypes.c_int64, ctypes.POINTER(Job)),
    "rb_number": (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
    "rb_huge_pages": (None, ctypes.c_void_p, ctypes.c_int64),
}


def load(task, law):
    """The backend for a `_Task` of sampler.py, or None, after one warning, where its code cannot be compiled.

    law: C that defines hop_t, mix, below, count_row and pick_row for node ids ID and weights WEIGHT.
    """
    weights = task.weights
    if weights is not None and weights.dtype not in TYPES:  # float16, bfloat16
        weights = weights.float()
    library = _library(law, task.indices.dtype, torch.float32 if weights is None else weights.dtype)
    return Backend(task._replace(weights=weights), library) if library else None


@functools.lru_cache(maxsize=None)
def _library(law, ids, weights):
    flags = [*FLAGS, f"-DID={TYPES[ids]}", f"-DWEIGHT={TYPES[weights]}"]
    return native.load_c("sampler", INCLUDES + law + PASSES, flags, SIGNATURES)


class Backend:
    """Calls the C code; ctypes releases the GIL meanwhile. Working memory is as large as a batch, not as the graph."""

    def __init__(self, task, library):
        self.task, self.library = task, library
        self.idle = []  # working memory between batches
        self.slots = 0  # of the table, at the end of the last batch: the next one will need about as many

    def sample(self, seeds, hops):
        """Sample the hops one after the other; see sampler.py for what comes and goes."""
        try:
            work = self.idle.pop()  # atomic, as append is: calls on several threads never share one
        except IndexError:
            work = WorkingMemory(self.library, seeds.dtype)
        if not work.number(seeds, max(self.slots, 2 * seeds.numel())):
            return None
        src, blocks = seeds, []
        for hop in hops:
            blocks.append(self._hop(work, src, hop))
            src = blocks[-1][2]
        self.slots = work.slots
        self.idle.append(work)
        return blocks

    def _hop(self, work, dst, hop):
        task, S, V = self.task, dst.numel(), self.task.indptr.numel() - 1
        offsets, (start, degree) = dst.new_empty(S + 1), work.rows(S)
        job = Job(k=hop.k, key=hop.key, S=S, threads=task.threads or torch.get_num_threads())
        job.mode = ("uniform", "replace", "labor", "weighted").index(task.rule)  # the enum of the law
        job.indptr, job.indices = task.indptr.data_ptr(), task.indices.data_ptr()
        job.weights = None if task.weights is None else task.weights.data_ptr()
        job.dst, job.start, job.degree, job.offsets = (t.data_ptr() for t in (dst, start, degree, offsets))
        E = self.library.rb_count(job)
        if E > torch.iinfo(dst.dtype).max:
            raise ValueError(f"this hop has {E} edges, too many for {dst.dtype} blocks; use smaller batches or fanouts")
        if E < 0:
            raise MemoryError(f"no memory to sample a hop of {S} nodes")

        local, src = dst.new_empty(E), dst
        edges = torch.empty(E, dtype=torch.int64) if task.edge_ids else None
        job.local, job.edges = local.data_ptr(), edges.data_ptr() if task.edge_ids else None
        if hop.relabel:
            most = min(S + E, V)  # nodes after this hop; a table that is at most half full is quickly searched
            if work.slots < 2 * most:
                work.number(dst, 2 * most)
            src = dst.new_empty(S + E + 1)
            job.src, job.table, job.bits = src.data_ptr(), work.table.data_ptr(), work.bits
        N = self.library.rb_pick(job)
        if N < 0:
            raise MemoryError(f"no memory to sample a hop of {S} nodes")
        return offsets, local, src[:N], edges


class WorkingMemory:
    """What one batch works in, kept for the next: the table of numbers, and start and degree of every row."""

    def __init__(self, library, dtype):
        self.library, self.bits = library, 0
        self.table = torch.empty(0, dtype=dtype)  # [2 * slots] node, number, node, number ...
        self.start_and_degree = torch.empty(2, 0, dtype=torch.int64)

    @property
    def slots(self):
        """Slots of the table in use, a power of two."""
        return 1 << self.bits

    def rows(self, S):
        """Room for start and degree of S rows, int64 [2, S or more]."""
        if self.start_and_degree.shape[1] < S:
            self.start_and_degree = torch.empty(2, S + S // 8, dtype=torch.int64)
        return self.start_and_degree

    def number(self, nodes, slots):
        """Empty the table, make it at least `slots` large and number the nodes from 0; False if one is repeated."""
        self.bits = max(4, (slots - 1).bit_length())
        if self.table.numel() < 2 * self.slots:
            self.table = self.table.new_empty(2 * self.slots)
            self.library.rb_huge_pages(self.table.data_ptr(), self.table.numel() * self.table.element_size())
        return self.library.rb_number(self.table.data_ptr(), self.bits, nodes.data_ptr(), nodes.numel()) < 0
