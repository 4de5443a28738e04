"""The CUDA backend of sampler.py: the law as kernels, and batches that wait for the GPU once.

Copy this file, native_cuda.py and native.py beside sampler.py, which hands it the law; it imports nothing from there. A
batch of three hops is eleven launches, nine where the outermost hop keeps global ids:

    begin    seeds take the first positions; the edges of the batch have the next ones, hop after hop
    pick     (a thread a row) edges drawn, their nodes read; each edge bids its position for its node, in a table [V]:
             the smallest stays (atomicMin), where the node appears first, whatever the order of threads
    mark     (a thread 32 edges) which edges won
    number   nodes whose edge won are the next source nodes, numbered in the order of positions
    finish   every edge of the batch reads the number of its node

LABOR and weighted draws, and batches with excluded edges, have one more, `count`, before `pick`. Prefix sums take no
pass of their own: a thread that writes a count also adds it to the sums of 64 and of 4,096 counts, so a prefix is the
sum of some 200 numbers. Positions are offset downward from batch to batch: what an earlier batch left in the table is
larger than any bid of this one, so that nothing has to be cleaned.

All shapes follow from the number of seeds: room for the most edges possible, or, where that is unknown or too much
(fanout -1, LABOR), for somewhat more than batches took so far; a batch that does not fit says so and is made again.
Sizes and the step are read from GPU memory. So the same launches make every batch, and a CUDA graph can hold them:

    frame = backend.frame(1024, hops=2)   # blocks and sizes that stay where they are
    frame.aggregate(features, x)          # the third hop in one kernel: neighbours drawn and averaged, never written
    with torch.cuda.graph(graph):
        frame.start()
    frame.fill(seeds, step)
    graph.replay()
    frame.trouble                         # not 0, when that is done: make the batch by `sample` instead
"""

import ctypes
from itertools import accumulate

import torch

from native_cuda import DIALECT, load_cuda

COUNTED = ("uniform", "replace")  # rules by which a degree tells how many edges a row will have
ROOM = 1 << 24  # edges of a hop that room is made for without asking whether they ever come
NONE = 2**31 - 64  # in the table: larger than any position, and 32 more are an int
REPEATED, UNKNOWN, FULL, DAMAGED = 1, 2, 4, 8  # what may be wrong with a batch or the graph
LANES = 8  # threads of a row of the outermost hop: 8 x 16 bytes are the lines that memory is read by
REGISTERS = (8, 16, 32, 64)  # fanouts up to these have a kernel whose picks are held in registers

_TYPES = r"""
enum { REPEATED = 1, UNKNOWN = 2, FULL = 4 };  // trouble
typedef struct {  // a batch: what it is drawn from, what is made, and the memory it is made in; L hops
  const i64 *indptr; const ID *indices; const WEIGHT *weights;
  i64 V, M, rule; u64 seed;
  const i64 *input;  // step, S, what is added to a position in the table, S seeds
  ID *src;           // source nodes of all hops: the first N of a hop are its sources
  ID *local;         // by position: node of an edge, in the end its number
  i64 *edges;        // by position: edge in the graph's indices; null: not asked for
  double *best;      // by position: scratch of weighted draws
  int *table;        // [V]
  int *number;       // by position: number of the node that appears there first
  int *count;        // edges of a row of the hop at hand
  unsigned *won; int *wins;  // of 32 edges of the hop at hand: which appear first, and how many
  u64 *keys;         // [L]
  i64 *sizes;        // [2 + 2 L] trouble, S, then E and N of each hop
  i64 *wanted;       // [2 L] E and N without regard to the room
  i64 *first;        // [L] position of a hop's first edge
  const i64 *excluded; i64 num_excluded;  // edges, ascending
  i64 *damaged;      // [1] not 0 once the graph was seen to be damaged; not in sizes[0], which begin still clears then
} batch_t;
typedef struct {  // a hop
  i64 hop, k, relabel;
  i64 rows, places, words;  // room for its destinations, its edges, and 32 edges each
  i64 next_rows;            // room for its sources
  i64 first;                // position of its first edge
  ID *offsets;              // [rows + 1] of the block
  u64 *row_sums, *word_sums;
} part_t;

// A changed byte on the disk must not end the process: lists and ids that lie outside of the graph are not read at.
FN i64 degree_of(const batch_t *b, i64 v) {
  i64 start = b->indptr[v], end = b->indptr[v + 1];
  if (0 <= start && start <= end && end <= b->M) return end - start;
  *b->damaged = 1;
  return 0;
}
FN row_t row_of(const batch_t *b, i64 v) {
  row_t row = {b->indptr[v], degree_of(b, v), 0, 0};
  if (b->num_excluded) exclude(&row, b->excluded, b->num_excluded);
  return row;
}
FN int outside(const batch_t *b, ID node) { return (u64)(i64)node >= (u64)b->V; }
"""

_KERNELS = r"""
FN void report(const batch_t *b, u64 trouble) { atomicOr((u64 *)b->sizes, trouble); }
FN int ones(unsigned x) {
  x -= x >> 1 & 0x55555555;
  x = (x & 0x33333333) + (x >> 2 & 0x33333333);
  return (x + (x >> 4) & 0x0f0f0f0f) * 0x01010101 >> 24;
}

// Count number i of n, into the sums of 64 and of 4,096 of them.
FN void tally(int *count, u64 *sums, i64 n, i64 i, i64 value) {
  count[i] = (int)value;
  if (!value) return;
  atomicAdd(&sums[i / 64], (u64)value);
  atomicAdd(&sums[n / 64 + 1 + i / 4096], (u64)value);
}
// The sum of counts 0 .. i - 1.
FN i64 before(const int *count, const u64 *sums, i64 n, i64 i) {
  const u64 *large = sums + n / 64 + 1;
  i64 sum = 0;
  for (i64 q = 0; q < i / 4096; q++) sum += large[q];
  for (i64 q = i / 4096 * 64; q < i / 64; q++) sum += sums[q];
  for (i64 q = i / 64 * 64; q < i; q++) sum += count[q];
  return sum;
}

FN hop_t law_of(const batch_t *b, const part_t *h) {
  hop_t hop = {b->indptr, b->indices, b->weights, b->rule, h->k, b->keys[h->hop]};
  return hop;
}
// Of a row whose degree tells it: of rules below LABOR, without excluded edges.
FN void count_by_degree(const batch_t *b, const part_t *h, i64 i, ID v) {
  i64 degree = degree_of(b, v), least = b->rule == REPLACE ? (degree ? h->k : 0) : degree;
  tally(b->count, h->row_sums, h->rows, i, h->k < 0 || least < h->k ? least : h->k);
}
// Where the edges of row i of N begin; writes it.
FN i64 open_row(const batch_t *b, const part_t *h, i64 i, i64 N) {
  i64 wanted = before(b->count, h->row_sums, h->rows, i < N ? i : N);
  i64 at = wanted < h->places ? wanted : h->places;
  h->offsets[i] = (ID)at;
  if (i == N) {
    b->sizes[2 + 2 * h->hop] = at;
    b->wanted[2 * h->hop] = wanted;
    b->first[h->hop] = h->first;
    if (at < wanted) report(b, FULL);
  } else if (i < N && h->hop == 0) {  // every seed has taken its position
    i64 seed = b->input[3 + i];
    if (seed < 0 || seed >= b->V) report(b, UNKNOWN);
    else if (b->table[seed] != b->input[2] + i) report(b, REPEATED);
  }
  return at;
}
FN i64 edges_of(const batch_t *b, const part_t *h, i64 i, i64 at) {
  return b->count[i] < h->places - at ? b->count[i] : h->places - at;
}
FN void put_edge(const batch_t *b, const part_t *h, i64 place, ID node) {
  i64 position = h->first + place;
  b->local[position] = node;
  if (h->relabel) atomicMin(&b->table[node], (int)(b->input[2] + position));
}

// counts: the rows are counted as well.
KERNEL begin(batch_t b, part_t h, i64 hops, i64 counts) {
  THREAD(h.rows < hops ? hops : h.rows);
  if (i < hops) b.keys[i] = mix(mix(mix(b.seed) ^ (u64)b.input[0]) ^ (u64)i);
  if (i == 0) {
    b.sizes[0] = 0;
    b.sizes[1] = b.input[1];
  }
  if (i >= b.input[1]) return;
  i64 seed = b.input[3 + i];
  int known = seed >= 0 && seed < b.V;
  b.src[i] = known ? (ID)seed : 0;
  b.number[i] = (int)i;
  if (known) atomicMin(&b.table[seed], (int)(b.input[2] + i));
  if (counts) count_by_degree(&b, &h, i, b.src[i]);
}
KERNEL count(batch_t b, part_t h) {
  THREAD(b.sizes[1 + 2 * h.hop]);
  hop_t hop = law_of(&b, &h);
  row_t row = row_of(&b, b.src[i]);
  tally(b.count, h.row_sums, h.rows, i, count_row(&hop, &row));
}
// Any rule, any fanout: the edges; edges and best are scratch here.
KERNEL pick(batch_t b, part_t h) {
  THREAD(h.rows + 1);
  i64 N = b.sizes[1 + 2 * h.hop], at = open_row(&b, &h, i, N);
  if (i >= N) return;
  hop_t hop = law_of(&b, &h);
  row_t row = row_of(&b, b.src[i]);
  i64 n = edges_of(&b, &h, i, at), *edges = b.edges + h.first + at;
  if (n == b.count[i]) pick_row(&hop, (u64)b.src[i], &row, n, edges, b.best + h.first + at);
  else for (i64 j = 0; j < n; j++) edges[j] = row.start;  // no room: the batch will be made again
}
// Their nodes.
KERNEL claim(batch_t b, part_t h) {
  THREAD(b.sizes[2 + 2 * h.hop]);
  ID node = b.indices[b.edges[h.first + i]];
  if (outside(&b, node)) *b.damaged = 1;
  put_edge(&b, &h, i, outside(&b, node) ? 0 : node);
}
KERNEL mark(batch_t b, part_t h) {
  THREAD(h.words);
  i64 E = b.sizes[2 + 2 * h.hop], place = 32 * i;
  const ID *local = b.local + h.first;
  int bid = (int)(b.input[2] + h.first + place);
  unsigned won = 0;
  for (int a = 0; a < 32; a += 8) {
    int smallest[8];
    UNROLL for (int q = 0; q < 8; q++) smallest[q] = place + a + q < E ? b.table[local[place + a + q]] : -1;
    UNROLL for (int q = 0; q < 8; q++) won |= (unsigned)(smallest[q] == bid + a + q) << (a + q);
  }
  b.won[i] = won;
  tally(b.wins, h.word_sums, h.words, i, ones(won));
}
// counts: the rows of `next` are counted as well, those of the destinations and those of the nodes that get a number.
KERNEL number(batch_t b, part_t h, part_t next, i64 counts) {
  THREAD(32 * h.words < h.rows ? h.rows : 32 * h.words);
  i64 N = b.sizes[1 + 2 * h.hop], last = 32 * h.words - 1;
  unsigned won = i <= last ? b.won[i / 32] : 0, mine = won >> i % 32 & 1;
  if (mine || i == last) {
    i64 at = N + before(b.wins, h.word_sums, h.words, i / 32) + ones(won & ((1u << i % 32) - 1));
    if (mine && at < h.next_rows) {
      ID node = b.local[h.first + i];
      b.number[h.first + i] = (int)at;
      b.src[at] = node;
      if (counts) count_by_degree(&b, &next, at, node);
    }
    if (i == last) {
      i64 wanted = at + mine;
      b.sizes[3 + 2 * h.hop] = wanted < h.next_rows ? wanted : h.next_rows;
      b.wanted[1 + 2 * h.hop] = wanted;
      if (wanted > h.next_rows) report(&b, FULL);
    }
  }
  if (counts && i < N) count_by_degree(&b, &next, i, b.src[i]);
}
// Of the first `hops` hops, which have positions start .. end - 1: where no edge is, -1. All sums are zero for the next
// batch.
KERNEL finish(batch_t b, i64 hops, i64 start, i64 end, u64 *sums, i64 num_sums) {
  THREAD(end < num_sums ? num_sums : end);
  if (i < num_sums) sums[i] = 0;
  if (i < start || i >= end) return;
  int edge = 0;
  for (i64 hop = 0; hop < hops; hop++) {
    i64 place = i - b.first[hop];
    edge |= 0 <= place && place < b.sizes[2 + 2 * hop];
  }
  b.local[i] = edge ? b.number[b.table[b.local[i]] - b.input[2]] : -1;
}
"""

# For fanouts up to KMAX, uniform and with replacement: all of a row is under way at once, picks are held in registers.
_CHOOSE = r"""
FN void choose_KMAX(u64 key, ID v, unsigned degree, unsigned k, int n, int replace, unsigned *place) {
  u64 row = mix(key ^ (u64)v);
  UNROLL for (int j = 0; j < KMAX; j++) if (j < n) {
    unsigned pick = j, last = degree - k + j;
    if (replace) pick = (unsigned)below(mix(row ^ (u64)j) >> 32, degree);
    else if (degree > k) {  // Floyd, as pick_row does it
      pick = (unsigned)below(mix(row ^ (u64)j) >> 32, (i64)last + 1);
      UNROLL for (int q = 0; q < j; q++) pick = place[q] == pick ? last : pick;
    }
    place[j] = pick;
  }
}
FN void read_KMAX(const batch_t *b, i64 start, const unsigned *place, int n, ID *node) {
  int damaged = 0;
  UNROLL for (int j = 0; j < KMAX; j++) node[j] = j < n ? b->indices[start + place[j]] : 0;
  UNROLL for (int j = 0; j < KMAX; j++) damaged |= outside(b, node[j]);
  if (!damaged) return;
  *b->damaged = 1;
  UNROLL for (int j = 0; j < KMAX; j++) node[j] = 0;
}
"""
_PICK = r"""
KERNEL pick_KMAX(batch_t b, part_t h) {
  THREAD(h.rows + 1);
  i64 N = b.sizes[1 + 2 * h.hop], at = open_row(&b, &h, i, N);
  if (i >= N) return;
  ID v = b.src[i], node[KMAX];
  i64 start = b.indptr[v];
  int n = (int)edges_of(&b, &h, i, at);
  unsigned place[KMAX];
  choose_KMAX(b.keys[h.hop], v, (unsigned)(b.indptr[v + 1] - start), (unsigned)h.k, n, b.rule == REPLACE, place);
  if (b.edges) {
    UNROLL for (int j = 0; j < KMAX; j++) if (j < n) b.edges[h.first + at + j] = start + place[j];
  }
  read_KMAX(&b, start, place, n, node);
  UNROLL for (int j = 0; j < KMAX; j++) if (j < n) put_edge(&b, &h, at + j, node[j]);
}
"""

# LANES threads a row of out, each with VEC columns of every VEC LANES; ROWS rows of features are under way at once.
_AGGREGATE = r"""
typedef unsigned short bf16;
typedef union { float f; unsigned bits; } word_t;
FN float up_float(float x) { return x; }
FN float up_bf16(bf16 x) { word_t w; w.bits = (unsigned)x << 16; return w.f; }
FN float down_float(float x) { return x; }
FN bf16 down_bf16(float x) {  // to nearest, ties to even
  word_t w; w.f = x;
  return (bf16)(x != x ? 0x7fc0 : w.bits + 0x7fff + (w.bits >> 16 & 1) >> 16);
}
typedef struct __attribute__((aligned(VEC * sizeof(IN)))) { IN x[VEC]; } in_t;
typedef struct __attribute__((aligned(VEC * sizeof(OUT)))) { OUT x[VEC]; } out_t;

KERNEL pick_aggregate(batch_t b, part_t h, const in_t *features, i64 width, out_t *out) {
  THREAD(h.rows * LANES);
  i64 row = i / LANES, v = 0, start = 0;
  int n = 0;
  unsigned place[KMAX];
  ID node[KMAX];
  if (row < b.sizes[1 + 2 * h.hop]) {
    v = b.src[row];
    start = b.indptr[v];
    i64 degree = degree_of(&b, v);
    n = (int)(b.rule == REPLACE ? degree ? KMAX : 0 : degree < KMAX ? degree : KMAX);
    choose_KMAX(b.keys[h.hop], (ID)v, (unsigned)degree, KMAX, n, b.rule == REPLACE, place);
  }
  read_KMAX(&b, start, place, n, node);
  float scale = n ? 1.0f / (float)n : 0.0f;
  int padding = row >= b.sizes[1 + 2 * h.hop];
  for (i64 c = i % LANES; c < width; c += LANES) {
    in_t own = features[v * width + c], rows[ROWS];
    float sum[VEC];
    out_t result;
    UNROLL for (int x = 0; x < VEC; x++) sum[x] = 0;
    UNROLL for (int a = 0; a < KMAX; a += ROWS) {
      UNROLL for (int j = 0; j < ROWS; j++) if (a + j < KMAX && a + j < n) rows[j] = features[node[a + j] * width + c];
      UNROLL for (int j = 0; j < ROWS; j++) if (a + j < KMAX && a + j < n) {
        UNROLL for (int x = 0; x < VEC; x++) sum[x] += UP(rows[j].x[x]);
      }
    }
    UNROLL for (int x = 0; x < VEC; x++) result.x[x] = padding ? DOWN(0.0f) : DOWN(UP(own.x[x]));
    out[row * 2 * width + c] = result;
    UNROLL for (int x = 0; x < VEC; x++) result.x[x] = DOWN(sum[x] * scale);
    out[row * 2 * width + width + c] = result;
  }
}
"""
_FLOATS = {torch.float32: "float", torch.bfloat16: "bf16"}


def source(dtype, law):
    """CUDA source of the sampler for ids of a dtype; law: C that defines mix, below, hop_t, row_t and their functions."""
    picks = "".join((_CHOOSE + _PICK).replace("KMAX", str(k)) for k in REGISTERS)
    return _preface(dtype, law) + _KERNELS + picks


def aggregate_source(dtype, law, k, features, out):
    """CUDA source of pick_aggregate for fanout k, features [V, F] and out [rows, 2F] -> (source, VEC)."""
    vec = 4 if features.shape[1] % 4 == 0 else 1
    types = {"IN": _FLOATS[features.dtype], "OUT": _FLOATS[out.dtype], "VEC": vec, "ROWS": 8, "LANES": LANES}
    types |= {"UP": f"up_{_FLOATS[features.dtype]}", "DOWN": f"down_{_FLOATS[out.dtype]}"}
    defines = "".join(f"#define {name} {value}\n" for name, value in types.items())
    return defines + _preface(dtype, law) + (_CHOOSE + _AGGREGATE).replace("KMAX", str(k)), vec


def _preface(dtype, law):
    ids = "int" if dtype == torch.int32 else "long long"
    return f"{DIALECT}typedef {ids} ID;\ntypedef double WEIGHT;\n{law}{_TYPES}"


class _Batch(ctypes.Structure):
    """batch_t."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("indptr", "indices", "weights")]
    _fields_ += [("V", ctypes.c_int64), ("M", ctypes.c_int64), ("rule", ctypes.c_int64), ("seed", ctypes.c_uint64)]
    _fields_ += [(name, ctypes.c_void_p) for name in (
        "input", "src", "local", "edges", "best", "table", "number", "count", "won", "wins", "keys", "sizes", "wanted",
        "first", "excluded")]  # fmt: skip
    _fields_ += [("num_excluded", ctypes.c_int64), ("damaged", ctypes.c_void_p)]


class _Part(ctypes.Structure):
    """part_t."""

    _fields_ = [(name, ctypes.c_int64) for name in (
        "hop", "k", "relabel", "rows", "places", "words", "next_rows", "first")]  # fmt: skip
    _fields_ += [(name, ctypes.c_void_p) for name in ("offsets", "row_sums", "word_sums")]


def load(task, fanouts, seed, law):
    """A Backend for a graph that a GPU can read; None, after one warning, where kernels cannot be compiled."""
    backend = Backend(task, fanouts, seed, law, lambda name, text: load_cuda(name, text, task.indices.device))
    return backend if backend.kernels else None


class Backend:
    """Samples batches on a GPU. Calls from several threads of the host, on streams of their own, do not wait for each
    other: each works in a `Frame` of its own, which keeps 4 bytes for each node of the graph.

    Args:
        task: indptr, indices, weights, rule, edge_ids; see `_Task` of sampler.py.
        fanouts: list of k, from the seeds outward.
        seed: int.
        law: C, see `source`.
        compiled: function of a name and CUDA source -> native_cuda.Kernels or None.
    """

    def __init__(self, task, fanouts, seed, law, compiled):
        self.task, self.fanouts, self.seed, self.law, self.compiled = task, fanouts, seed, law, compiled
        self.kernels = compiled("sampler", source(task.indices.dtype, law))
        self.num_nodes, self.num_edges = task.indptr.numel() - 1, task.indices.numel()
        self.weights = None if task.weights is None else task.weights.double()
        self.most = [0] * len(fanouts)  # edges of a hop that asked for more room than it was given, and some more
        self.resting = []  # frames; pop and append are atomic

    def sample(self, seeds, step, relabel_outer=True, exclude=None):
        """Sample the neighbourhood of seeds.

        Args:
            seeds: int32 or int64 [S], on the GPU or the CPU, page-locked or not.
            step: int.
            relabel_outer: False leaves global ids in the outermost hop.
            exclude: int64 [X] edges, ascending, on the GPU, or None.

        Returns:
            [(indptr, indices, src_nodes, edge_ids or None)] for each hop, from the seeds outward, in memory that they
            share, of the current stream. None where a seed is not a node or comes twice.
        """
        if not seeds.numel():
            return [self._nothing() for _ in self.fanouts]
        if not self.num_nodes:
            return None
        with self.kernels.current():
            try:
                frame = self.resting.pop()
            except IndexError:
                frame = Frame(self)
            while True:  # until it fits
                frame.fit(*self.shapes(seeds.numel()), relabel_outer, exclude is not None)
                frame.make_blocks()
                frame.fill(seeds, step, exclude)
                frame.start()
                self.kernels.wait()
                trouble = frame.trouble
                if trouble & DAMAGED:
                    raise IndexError("the graph is damaged: a list in indptr or a node in indices lies outside of it")
                if trouble != FULL:
                    break
                for hop, (wanted, part) in enumerate(zip(frame.wanted, frame.parts)):
                    self.most[hop] = max(self.most[hop], wanted + wanted // 4 if wanted > part.places else 0)
            blocks = None if trouble else frame.cut()
            frame.memory = frame.edges = None  # the blocks'
            self.resting.append(frame)  # idle: the GPU is done with it, whatever stream the next batch is on
        return blocks

    def _nothing(self):
        none = self.task.indices.new_empty(0)
        return none.new_zeros(1), none, none, none.new_empty(0, dtype=torch.int64) if self.task.edge_ids else None

    def shapes(self, S):
        """Room for a batch of S seeds -> (source nodes of each hop [L + 1], the seeds first; edges of each hop [L])."""
        rows, places = [S], []
        for k, most in zip(self.fanouts, self.most):
            room = rows[-1] * k if self.task.rule == "replace" else self.num_edges
            known = k > 0 and self.task.rule != "labor"
            if known:
                room = min(room, rows[-1] * k)
            if not known or room > ROOM:
                usual = k if k > 0 else self.num_edges / self.num_nodes
                room = min(room, most or min(int(1.25 * usual * rows[-1]) + 4096, ROOM))
            places.append(max(room, 1))
            rows.append(min(rows[-1] + places[-1], self.num_nodes))
        if S + sum(places) >= NONE:
            raise ValueError(f"a batch of up to {sum(places)} edges is too large for the kernels; use smaller batches")
        return rows, places

    def frame(self, batch_size, hops=None, rows=None, places=None):
        """A Frame for batches of up to `batch_size` seeds, whose blocks stay where they are.

        Args:
            hops: how many, from the seeds outward; all when None.
            rows, places: room for source nodes [hops + 1], the seeds first, and for edges [hops] of each hop; for as
                many as are possible when None.
        """
        hops, shapes = hops or len(self.fanouts), self.shapes(batch_size)
        with self.kernels.current():
            frame = Frame(self)
            frame.fit((rows or shapes[0])[: hops + 1], (places or shapes[1])[:hops], True)
            frame.make_blocks()
            frame.memory.zero_()  # ids in the padding of src_nodes are ids of nodes
        return frame


class Frame:
    """The memory that a batch is sampled in and the launches that do it, for one batch at a time.

    Attributes:
        given: int64 [3 + S] page-locked: step, S, the offset of positions, seeds. input: the same on the GPU.
        sizes: int64 [3 + 5 L] on the GPU: trouble, S, then E and N of each hop; the rest see batch_t.
        memory: what the blocks of the batch lie in.
    """

    def __init__(self, backend):
        task, L = backend.task, len(backend.fanouts)
        self.backend, self.ids, self.kernels = backend, task.indices, backend.kernels
        self.shape, self.kept, self.base = None, {}, 0
        self.batch, self.parts = _Batch(), [_Part(hop, k) for hop, k in enumerate(backend.fanouts)]
        self.table = self.ids.new_empty(backend.num_nodes, dtype=torch.int32)
        self.sizes, self.keys = self._integers(3 + 5 * L), self._integers(L)
        self.read = self._integers(3 + 5 * L, pinned=True)
        self.told = (ctypes.c_int64 * (3 + 5 * L)).from_address(self.read.data_ptr())
        b, sizes = self.batch, self.sizes.data_ptr()
        b.indptr, b.indices = task.indptr.data_ptr(), task.indices.data_ptr()
        b.weights = None if backend.weights is None else backend.weights.data_ptr()
        b.V, b.M, b.rule, b.seed = backend.num_nodes, backend.num_edges, task.rule_number, backend.seed & (2**64 - 1)
        b.table, b.keys = self.table.data_ptr(), self.keys.data_ptr()
        b.sizes, b.wanted = sizes, sizes + 8 * (2 + 2 * L)
        b.first, b.damaged = sizes + 8 * (2 + 4 * L), sizes + 8 * (2 + 5 * L)

    def _integers(self, n, pinned=False):
        """int64 zeros, on the GPU or in page-locked memory."""
        device = "cpu" if pinned else self.ids.device
        return torch.zeros(n, dtype=torch.int64, device=device, pin_memory=pinned and self.ids.is_cuda)

    def _room(self, name, n, dtype=torch.int32):
        """Pointer to memory of n numbers, zero at first, that is kept for the next batches."""
        kept = self.kept.get(name)
        if kept is None or kept.numel() < n:
            self.kept[name] = kept = torch.zeros(n + n // 8, dtype=dtype, device=self.ids.device)
        return kept.data_ptr()

    def fit(self, rows, places, relabel_outer, excludes=False):
        """Make room for source nodes and edges of these numbers, see `Backend.shapes`."""
        if self.shape == (rows, places, relabel_outer, excludes):
            return
        self.shape = rows, places, relabel_outer, excludes
        S, task, b, hops = rows[0], self.backend.task, self.batch, len(places)
        self.counted = task.rule in COUNTED and not excludes
        words = [-(-n // 32) for n in places]
        first = list(accumulate(places, initial=S))
        self.positions = first[-1]
        b.number, b.count = self._room("number", self.positions), self._room("count", max(rows))
        b.won, b.wins = self._room("won", max(words)), self._room("wins", max(words))
        if task.rule == "weighted":
            b.best = self._room("best", self.positions, torch.float64)
        lengths = [n // 64 + n // 4096 + 2 for pair in zip(rows, words) for n in pair]
        *sums, num_sums = accumulate(lengths, initial=0)
        pointer = self._room("sums", num_sums, torch.int64)
        for hop, part in enumerate(self.parts[:hops]):
            part.relabel = relabel_outer or hop + 1 < len(self.parts)
            part.places, part.words, part.first = places[hop], words[hop], first[hop]
            part.row_sums, part.word_sums = pointer + 8 * sums[2 * hop], pointer + 8 * sums[2 * hop + 1]
        for part, n, sources in zip(self.parts, rows, [*rows[1:], 0]):
            part.rows, part.next_rows = n, sources
        self.given, self.input = self._integers(3 + S, pinned=True), self._integers(3 + S)
        self.header = (ctypes.c_int64 * 3).from_address(self.given.data_ptr())
        self.sent = 3 + S
        b.input = self.input.data_ptr()
        self.steps = list(self._steps(hops, pointer, num_sums))

    def _steps(self, hops, sums, num_sums):
        """(launch, number of threads) one after the other."""
        prepare, parts, b = self.kernels.prepare, self.parts[:hops], self.batch
        begin = prepare("begin", b, parts[0], len(self.parts), int(self.counted))
        yield begin, max(parts[0].rows, len(self.parts))
        for part, following in zip(parts, [*parts[1:], None]):
            if not self.counted:
                yield prepare("count", b, part), part.rows
            if self._in_registers(part.k):
                yield prepare(f"pick_{next(k for k in REGISTERS if k >= part.k)}", b, part), part.rows + 1
            else:
                yield prepare("pick", b, part), part.rows + 1
                yield prepare("claim", b, part), part.places
            if part.relabel:
                yield prepare("mark", b, part), part.words
                counts = self.counted and following is not None
                yield prepare("number", b, part, following or part, int(counts)), max(32 * part.words, part.rows)
        hops = sum(part.relabel for part in parts)
        end = parts[hops].first if hops < len(parts) else self.positions
        yield prepare("finish", b, hops, parts[0].first, end, sums, num_sums), max(end, num_sums)

    def _in_registers(self, k):
        return self.counted and 0 < k <= REGISTERS[-1]

    def make_blocks(self):
        """Take memory for the blocks of a batch."""
        (rows, places, *_), b, task = self.shape, self.batch, self.backend.task
        parts = self.parts[: len(places)]
        self.local = max(rows[0], rows[sum(part.relabel for part in parts)])  # in `memory` lie src, local, and
        self.offsets = list(accumulate((n + 1 for n in rows[: len(places)]), initial=self.local + self.positions))
        self.memory, self.edges = self.ids.new_empty(self.offsets.pop()), None
        pointer, size = self.memory.data_ptr(), self.memory.element_size()
        b.src, b.local, b.edges = pointer, pointer + size * self.local, None
        if task.edge_ids or not all(self._in_registers(part.k) for part in parts):
            self.edges = self.ids.new_empty(self.positions, dtype=torch.int64)
            b.edges = self.edges.data_ptr()
        for part, at in zip(parts, self.offsets):
            part.offsets = pointer + size * at

    def cut(self, sizes=None):
        """The blocks of a batch that is done, or, with sizes (S, then E and N of each hop), of that size."""
        sizes = sizes or self.told[1 : 2 + 2 * len(self.parts)]
        memory, N, blocks = self.memory, sizes[0], []
        for part, at, E, more in zip(self.parts, self.offsets, sizes[1::2], sizes[2::2]):
            indptr, indices = memory.narrow(0, at, N + 1), memory.narrow(0, self.local + part.first, E)
            N = more if part.relabel else N
            edge_ids = self.edges.narrow(0, part.first, E) if self.backend.task.edge_ids else None
            blocks.append((indptr, indices, memory.narrow(0, 0, N), edge_ids))
        return blocks

    @property
    def blocks(self):
        """The blocks with their padding, from the seeds outward.

        [(indptr [rows + 1], indices [places], src_nodes [rows of the next hop], edge_ids or None)]. Rows beyond the
        destinations have no edges; beyond the last, indices holds -1 and src_nodes some id of a node.
        """
        rows, places, *_ = self.shape
        return self.cut([rows[0], *(n for pair in zip(places, rows[1:]) for n in pair)])

    def fill(self, seeds, step, exclude=None):
        """Say what to sample; the batch before it, and its copy to the GPU, are done."""
        self.excluded = exclude  # kept until the next batch
        self.batch.excluded = None if exclude is None else exclude.data_ptr()
        self.batch.num_excluded = 0 if exclude is None else exclude.numel()
        if self.base < self.positions:  # the table has been used up, or never
            self.table.fill_(NONE)
            self.base = NONE
        self.base -= self.positions
        S = seeds.numel()
        self.header[0], self.header[1], self.header[2] = step, S, self.base
        if seeds.is_cuda:
            self.input[3 : 3 + S].copy_(seeds)
            self.sent = 3
        else:
            self.given[3 : 3 + S].copy_(seeds)
            self.sent = len(self.given)

    def start(self):
        """Start what makes a batch, on the current stream; a CUDA graph can capture it, for seeds from the CPU."""
        self.input[: self.sent].copy_(self.given[: self.sent], non_blocking=True)
        stream = self.kernels.stream()
        for launch, threads in self.steps:
            launch(threads, stream)
        self.read.copy_(self.sizes, non_blocking=True)

    @property
    def trouble(self):
        """What is wrong with the batch that is done: 0, or some of REPEATED, UNKNOWN, FULL, DAMAGED."""
        return self.told[0] | (DAMAGED if self.told[-1] else 0)

    @property
    def wanted(self):
        """How many edges each hop asked room for."""
        L = len(self.parts)
        return self.told[2 + 2 * L : 2 + 4 * L : 2]

    def aggregate(self, features, out):
        """Let `start` do the next hop as well, in one kernel: uniform draws of 1 to 64, with replacement or without.

        Args:
            features: float32 or bfloat16 [V, F].
            out: float32 or bfloat16 [rows, 2F], rows being the room for its destinations: their own rows beside the
                mean of their neighbours', added up in the order of the edges, as `self_and_mean` of fused.py does; zero
                beyond the last.

        Returns:
            False, after a warning, where the kernel cannot be compiled.
        """
        part, task = self.parts[len(self.shape[1])], self.backend.task
        text, vec = aggregate_source(task.indices.dtype, self.backend.law, part.k, features, out)
        kernels = self.backend.compiled("outermost-hop", text)
        if kernels:
            launch = kernels.prepare("pick_aggregate", self.batch, part, features, features.shape[1] // vec, out)
            self.steps.append((launch, LANES * part.rows))
            self.aggregated = features, out  # their memory is read and written at every start
        return kernels is not None
