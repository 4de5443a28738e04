"""The CUDA backend of sampler.py: the law as kernels, and batches that wait for the GPU once.

Copy this file and native_cuda.py beside sampler.py, which hands it the law; it imports nothing from there. A batch of
three hops is eleven launches, ten where the outermost hop keeps global ids:

    begin    seeds take the first positions; every edge of the batch gets the next, hop after hop
    pick     (a thread a row) edges drawn, their nodes read; each edge bids its position for its node, in a table [V]:
             the smallest stays (atomicMin), which is where the node appears first, whatever the order of threads
    mark     (a thread 32 edges) which edges won
    number   the nodes of edges that won are the next source nodes, in the order of positions: so many won before
    finish   every edge of the batch reads the number of its node

LABOR and weighted draws have one more, `count`, before `pick`. Prefix sums take no pass of their own: whoever writes a
count adds it to the sums of 64 and of 4,096 counts, and who needs what lies before adds up less than 200 numbers.
Positions count downward from batch to batch: what an earlier batch left in the table is larger than any bid of this one,
so that nothing has to be cleaned up.

All shapes follow from the number of seeds: room for the most edges possible, or, where that is unknown or too much
(fanout -1, LABOR), for somewhat more than batches took so far; a batch that does not fit says so and is made again.
Sizes stay on the device. So the launches are the same for every batch, and a CUDA graph can hold them: see `Frame`.
"""

import ctypes
from itertools import accumulate

import torch

from native_cuda import DIALECT, load_cuda

COUNTED = ("uniform", "replace")  # rules by which a degree tells how many edges a row will have
ROOM = 1 << 24  # edges of a hop that room is made for without asking whether they ever come
NONE = 2**31 - 1  # in the table: larger than any position
REPEATED, UNKNOWN, FULL = 1, 2, 4  # what may be wrong with a batch: sizes[0]
REGISTERS = (8, 16, 32, 64)  # fanouts up to these have a kernel whose picks are held in registers

_HEAD = r"""
enum { REPEATED = 1, UNKNOWN = 2, FULL = 4 };  // trouble
typedef struct {  // a batch: what it is drawn from, what is made, and the memory it is made in; L hops
  const i64 *indptr; const ID *indices; const WEIGHT *weights;
  i64 V, rule; u64 seed;
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
} batch_t;
typedef struct {  // a hop
  i64 hop, k, relabel;
  i64 rows, places, words;  // room for its destinations, its edges, and 32 edges each
  i64 next_rows;            // room for its sources
  i64 first;                // position of its first edge
  ID *offsets;              // [rows + 1] of the block
  u64 *row_sums, *word_sums;
} part_t;

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

FN void count_edges(const batch_t *b, const part_t *h, i64 i, ID v) {
  hop_t hop = {b->indptr, b->indices, b->weights, b->rule, h->k, b->keys[h->hop]};
  i64 start = b->indptr[v];
  tally(b->count, h->row_sums, h->rows, i, count_row(&hop, start, b->indptr[v + 1] - start));
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

KERNEL begin(batch_t b, part_t h, i64 hops) {
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
  if (b.rule < LABOR) count_edges(&b, &h, i, b.src[i]);
}
KERNEL count(batch_t b, part_t h) {
  THREAD(b.sizes[1 + 2 * h.hop]);
  count_edges(&b, &h, i, b.src[i]);
}
// Any rule, any fanout: the edges; edges and best are scratch here.
KERNEL pick(batch_t b, part_t h) {
  THREAD(h.rows + 1);
  i64 N = b.sizes[1 + 2 * h.hop], at = open_row(&b, &h, i, N);
  if (i >= N) return;
  hop_t hop = {b.indptr, b.indices, b.weights, b.rule, h.k, b.keys[h.hop]};
  i64 v = b.src[i], start = b.indptr[v], n = edges_of(&b, &h, i, at), *edges = b.edges + h.first + at;
  if (n == b.count[i]) pick_row(&hop, (u64)v, start, b.indptr[v + 1] - start, n, edges, b.best + h.first + at);
  else for (i64 j = 0; j < n; j++) edges[j] = start;  // no room: the batch will be made again
}
// Their nodes.
KERNEL claim(batch_t b, part_t h) {
  THREAD(b.sizes[2 + 2 * h.hop]);
  put_edge(&b, &h, i, b.indices[b.edges[h.first + i]]);
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
      if (counts) count_edges(&b, &next, at, node);
    }
    if (i == last) {
      i64 wanted = at + mine;
      b.sizes[3 + 2 * h.hop] = wanted < h.next_rows ? wanted : h.next_rows;
      b.wanted[1 + 2 * h.hop] = wanted;
      if (wanted > h.next_rows) report(&b, FULL);
    }
  }
  if (counts && i < N) count_edges(&b, &next, i, b.src[i]);
}
// Of the first `hops` hops; and all sums are zero for the next batch.
KERNEL finish(batch_t b, i64 hops, i64 positions, u64 *sums, i64 num_sums) {
  THREAD(positions < num_sums ? num_sums : positions);
  if (i < num_sums) sums[i] = 0;
  for (i64 hop = 0; hop < hops; hop++) {
    i64 place = i - b.first[hop];
    if (0 <= place && place < b.sizes[2 + 2 * hop]) b.local[i] = b.number[b.table[b.local[i]] - b.input[2]];
  }
}
"""

# For fanouts up to KMAX, uniform and with replacement: all of a row is under way at once, picks are held in registers.
_PICK = r"""
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
KERNEL pick_KMAX(batch_t b, part_t h) {
  THREAD(h.rows + 1);
  i64 N = b.sizes[1 + 2 * h.hop], at = open_row(&b, &h, i, N);
  if (i >= N) return;
  ID v = b.src[i], node[KMAX];
  i64 start = b.indptr[v];
  int n = (int)edges_of(&b, &h, i, at);
  unsigned place[KMAX];
  choose_KMAX(b.keys[h.hop], v, (unsigned)(b.indptr[v + 1] - start), (unsigned)h.k, n, b.rule == REPLACE, place);
  if (b.edges) UNROLL for (int j = 0; j < KMAX; j++) if (j < n) b.edges[h.first + at + j] = start + place[j];
  UNROLL for (int j = 0; j < KMAX; j++) if (j < n) node[j] = b.indices[start + place[j]];
  UNROLL for (int j = 0; j < KMAX; j++) if (j < n) put_edge(&b, &h, at + j, node[j]);
}
"""


def source(dtype, law):
    """CUDA source of all kernels for node ids of a dtype; law: C that defines hop_t, count_row, pick_row, below, mix."""
    ids = "int" if dtype == torch.int32 else "long long"
    picks = "".join(_PICK.replace("KMAX", str(k)) for k in REGISTERS)
    return f"{DIALECT}typedef {ids} ID;\ntypedef double WEIGHT;\n{law}{_HEAD}{picks}"


class _Batch(ctypes.Structure):
    """batch_t."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("indptr", "indices", "weights")]
    _fields_ += [("V", ctypes.c_int64), ("rule", ctypes.c_int64), ("seed", ctypes.c_uint64)]
    _fields_ += [(name, ctypes.c_void_p) for name in (
        "input", "src", "local", "edges", "best", "table", "number", "count", "won", "wins", "keys", "sizes", "wanted",
        "first")]  # fmt: skip


class _Part(ctypes.Structure):
    """part_t."""

    _fields_ = [(name, ctypes.c_int64) for name in (
        "hop", "k", "relabel", "rows", "places", "words", "next_rows", "first")]  # fmt: skip
    _fields_ += [(name, ctypes.c_void_p) for name in ("offsets", "row_sums", "word_sums")]


def load(task, fanouts, seed, law):
    """A Backend for a graph in GPU memory (or host memory that the GPU reads in place); None, after one warning, where
    kernels cannot be compiled."""
    kernels = load_cuda("sampler", source(task.indices.dtype, law), task.indices.device)
    return kernels and Backend(task, fanouts, seed, kernels)


class Backend:
    """Samples batches on a GPU.

    Calls from several threads of the host, on streams of their own, each work in a `Frame` of their own, which keeps 4
    bytes for each node of the graph.

    Args:
        task: indptr, indices, weights, rule and edge_ids; `_Task` of sampler.py.
        fanouts: list of k, from the seeds outward.
        seed: int.
        kernels: of `source`, native_cuda.Kernels or what stands for them in a test.
    """

    def __init__(self, task, fanouts, seed, kernels):
        self.task, self.fanouts, self.seed, self.kernels = task, fanouts, seed, kernels
        self.num_nodes, self.num_edges = task.indptr.numel() - 1, task.indices.numel()
        self.weights = None if task.weights is None else task.weights.double()
        self.most = [0] * len(fanouts)  # edges of a hop that asked for more room than it was given, and some more
        self.resting = []  # frames; pop and append are atomic

    def sample(self, seeds, step, relabel_outer=True):
        """Sample the neighbourhood of seeds.

        Args:
            seeds: int32 or int64 [S], on the CPU, pinned or not, or on the GPU.
            step: int.
            relabel_outer: False leaves global ids in the outermost hop.

        Returns:
            [(indptr, indices, src_nodes, edge_ids or None)] for each hop, from the seeds outward, on the current stream;
            they share their memory. None where a seed is not a node or comes twice.
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
            while True:
                rows, places = self.shapes(seeds.numel())
                frame.fit(rows, places, relabel_outer)
                frame.give(seeds, step)
                views = frame.outputs()
                frame.launch(self.kernels.stream())
                trouble, *sizes = frame.wait()
                if trouble != FULL:
                    break
                for hop, wanted in enumerate(frame.wanted()):
                    self.most[hop] = max(self.most[hop], wanted + wanted // 4 if wanted > places[hop] else 0)
            self.resting.append(frame)  # idle: the GPU is done with it, whatever stream the next batch is on
        return None if trouble else views(sizes)

    def _nothing(self):
        indices = self.task.indices
        none = indices.new_empty(0)
        edges = none.new_empty(0, dtype=torch.int64) if self.task.edge_ids else None
        return indices.new_zeros(1), none, none, edges

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
            raise ValueError(f"a batch of up to {sum(places)} edges is too large for the GPU kernels; use smaller batches")
        return rows, places


class Frame:
    """The memory that a batch is sampled in, and the launches that do it, one batch at a time.

    Attributes:
        given: int64 [3 + S], page-locked: step, S, base, seeds. input: the same on the GPU.
        sizes: int64 [2 + 5 L] on the GPU: trouble, S, (E, N) of each hop, then what was wanted; see batch_t.
    """

    def __init__(self, backend):
        task, L = backend.task, len(backend.fanouts)
        self.backend, self.ids, self.kernels = backend, task.indices, backend.kernels
        self.shape, self.memory, self.base = None, {}, 0
        self.batch, self.parts = _Batch(), [_Part() for _ in backend.fanouts]
        self.table = self.ids.new_empty(backend.num_nodes, dtype=torch.int32)
        self.sizes, self.sums = self._integers(2 + 5 * L), None
        self.read = self._integers(2 + 5 * L, pinned=True)
        self.keys = self._integers(L)
        b, sizes = self.batch, self.sizes.data_ptr()
        b.indptr, b.indices = task.indptr.data_ptr(), task.indices.data_ptr()
        b.weights = None if backend.weights is None else backend.weights.data_ptr()
        b.V, b.rule, b.seed = backend.num_nodes, task.rule_number, backend.seed & (2**64 - 1)
        b.table, b.keys = self.table.data_ptr(), self.keys.data_ptr()
        b.sizes, b.wanted, b.first = sizes, sizes + 8 * (2 + 2 * L), sizes + 8 * (2 + 4 * L)

    def _integers(self, n, pinned=False):
        """int64 zeros, on the GPU or in page-locked memory."""
        device = "cpu" if pinned else self.ids.device
        return torch.zeros(n, dtype=torch.int64, device=device, pin_memory=pinned and self.ids.is_cuda)

    def _room(self, name, n, dtype=torch.int32):
        """Pointer to memory of n numbers that is kept for the next batches."""
        kept = self.memory.get(name)
        if kept is None or kept.numel() < n:
            self.memory[name] = kept = torch.zeros(n + n // 8, dtype=dtype, device=self.ids.device)
        return kept.data_ptr()

    def fit(self, rows, places, relabel_outer):
        """Make room for destinations, edges and sources of these numbers, see `Backend.shapes`."""
        if self.shape == (rows, places, relabel_outer):
            return
        self.shape = rows, places, relabel_outer
        S, L, task, b = rows[0], len(places), self.backend.task, self.batch
        words = [-(-n // 32) for n in places]
        first = list(accumulate(places, initial=S))
        self.positions = first[-1]
        b.number, b.count = self._room("number", self.positions), self._room("count", max(rows[:-1]))
        b.won, b.wins = self._room("won", max(words)), self._room("wins", max(words))
        self.registers = [task.rule in COUNTED and 0 < k <= REGISTERS[-1] for k in self.backend.fanouts]
        self.wants_edges = task.edge_ids or not all(self.registers)
        if task.rule == "weighted":
            b.best = self._room("best", self.positions, torch.float64)
        lengths = [n // 64 + n // 4096 + 2 for pair in zip(rows, words) for n in pair]
        *sums, num_sums = accumulate(lengths, initial=0)
        pointer = self._room("sums", num_sums, torch.int64)
        for hop, part in enumerate(self.parts):
            part.hop, part.k, part.relabel = hop, self.backend.fanouts[hop], relabel_outer or hop + 1 < L
            part.rows, part.places, part.words = rows[hop], places[hop], words[hop]
            part.next_rows, part.first = rows[hop + 1], first[hop]
            part.row_sums, part.word_sums = pointer + 8 * sums[2 * hop], pointer + 8 * sums[2 * hop + 1]
        self.given, self.input = self._integers(3 + S, pinned=True), self._integers(3 + S)
        self.header = (ctypes.c_int64 * 3).from_address(self.given.data_ptr())
        b.input = self.input.data_ptr()
        self.steps = list(self._steps(pointer, num_sums))

    def _steps(self, sums, num_sums):
        """(launch, number of threads) one after the other."""
        prepare, parts, b = self.kernels.prepare, self.parts, self.batch
        counted = self.backend.task.rule in COUNTED  # with the rows themselves: a degree is all it takes
        yield prepare("begin", b, parts[0], len(parts)), max(parts[0].rows, len(parts))
        for part, following, registers in zip(parts, [*parts[1:], None], self.registers):
            if not counted:
                yield prepare("count", b, part), part.rows
            if registers:
                yield prepare(f"pick_{next(k for k in REGISTERS if k >= part.k)}", b, part), part.rows + 1
            else:
                yield prepare("pick", b, part), part.rows + 1
                yield prepare("claim", b, part), part.places
            if part.relabel:
                yield prepare("mark", b, part), part.words
                counts = counted and following is not None
                yield prepare("number", b, part, following or part, int(counts)), max(32 * part.words, part.rows)
        hops = sum(part.relabel for part in parts)
        yield prepare("finish", b, hops, self.positions, sums, num_sums), max(self.positions, num_sums)

    def give(self, seeds, step):
        """Bring seeds and step to the GPU."""
        if self.base < self.positions:  # the table has been used up, or never
            self.table.fill_(NONE)
            self.base = NONE
        self.base -= self.positions
        self.header[0], self.header[1], self.header[2] = step, seeds.numel(), self.base
        if seeds.is_cuda:
            self.input[:3].copy_(self.given[:3], non_blocking=True)
            self.input[3 : 3 + seeds.numel()].copy_(seeds)
        else:
            self.given[3 : 3 + seeds.numel()].copy_(seeds)
            self.input.copy_(self.given, non_blocking=True)

    def outputs(self):
        """Memory for the blocks of a batch -> function of the sizes that returns them."""
        rows, b, S = self.shape[0], self.batch, self.shape[0][0]
        relabelled = sum(part.relabel for part in self.parts)
        local = max(S, rows[relabelled])  # places in `memory`: src, local, offsets of each hop
        offsets = list(accumulate((n + 1 for n in rows[:-1]), initial=local + self.positions))
        memory = self.ids.new_empty(offsets[-1])
        edges = self.ids.new_empty(self.positions, dtype=torch.int64) if self.wants_edges else None
        pointer, size = memory.data_ptr(), memory.element_size()
        b.src, b.local, b.edges = pointer, pointer + size * local, edges.data_ptr() if self.wants_edges else None
        for part, at in zip(self.parts, offsets):
            part.offsets = pointer + size * at

        def views(sizes):
            N, blocks = sizes[0], []
            for part, at, E, more in zip(self.parts, offsets, sizes[1::2], sizes[2::2]):
                indptr, indices = memory.narrow(0, at, N + 1), memory.narrow(0, local + part.first, E)
                N = more if part.relabel else N
                edge_ids = edges.narrow(0, part.first, E) if self.backend.task.edge_ids else None
                blocks.append((indptr, indices, memory.narrow(0, 0, N), edge_ids))
            return blocks

        return views

    def launch(self, stream):
        """Start all kernels."""
        for launch, threads in self.steps:
            launch(threads, stream)

    def wait(self):
        """Wait for the GPU -> trouble, S, E and N of each hop."""
        self.read.copy_(self.sizes, non_blocking=True)
        self.kernels.wait()
        return self.read[: 2 + 2 * len(self.parts)].tolist()

    def wanted(self):
        """Edges that each hop asked room for, after wait()."""
        L = len(self.parts)
        return self.read[2 + 2 * L : 2 + 4 * L : 2].tolist()
