"""The CUDA kernels of sampler_cuda.py, which says in its first lines what each of them does and when it runs.

Copy both files. The source begins with the law of sampler.py and with batch_t and part_t: all that a batch is made
from, and a hop. Kernels use nothing beyond atomics: with `cc` they are C, whose threads can run in any order.
"""

import torch

from native_cuda import DIALECT

LANES = 8  # threads of a row of the outermost hop: 8 x 16 bytes are the lines that memory is read by
REGISTERS = (8, 16, 32, 64)  # fanouts up to these have a kernel whose picks are held in registers
AGGREGATED = 48  # and up to this one for the outermost hop in one kernel, which holds nodes and rows beside

_TYPES = r"""
enum { REPEATED = 1, UNKNOWN = 2, FULL = 4 };  // trouble
#define NO_PAIR (~0ULL)
typedef struct {  // a batch: what it is drawn from, what is made, and the memory it is made in; L hops
  const i64 *indptr; const ID *indices; const WEIGHT *weights;
  i64 V, M, rule, one_draw; u64 seed;
  const i64 *input;  // step; S; the offset of positions in the table (see sampler_cuda.py); S seeds
  ID *src;           // source nodes of all hops: the first N of a hop are its sources
  ID *local;         // by position: node of an edge, in the end its number
  i64 *edges;        // by position: edge in the graph's indices; null: not asked for
  double *best;      // by position: scratch of weighted draws
  int *table;        // [V] the smallest position that bids for a node, plus the offset
  int *number;       // by position: number of the node that appears there first
  int *count;        // edges of a row of the hop at hand
  unsigned *won; int *wins;  // of 32 edges of the hop at hand: which appear first, and how many
  u64 *keys;         // [L]
  i64 *sizes;        // [2 + 2 L] trouble, S, then E and N of each hop
  i64 *wanted;       // [2 L] E and N without regard to the room
  i64 *first;        // [L] position of a hop's first edge
  const i64 *excluded; i64 num_excluded;  // edges, ascending
  const i64 *edge_times; i64 strict;      // [M]; null: no times. With them:
  i64 *src_times;    // times of the source nodes
  int *group;        // the number of that time among those of the batch; they follow the seeds in input
  u64 *pairs;        // [slots] node + V * group of a slot of table, NO_PAIR where it is free
  i64 slots;         // a power of two
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
FN row_t row_of(const batch_t *b, i64 i) {  // of source i
  i64 v = b->src[i];
  row_t row = {b->indptr[v], degree_of(b, v), 0, 0};
  if (b->edge_times) row.degree = number_before(b->edge_times + row.start, row.degree, b->src_times[i], (int)b->strict);
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
// Count the edges of a row where its degree tells them: by rules before LABOR, without excluded edges.
FN void count_by_degree(const batch_t *b, const part_t *h, i64 i, ID v) {
  i64 degree = degree_of(b, v), least = b->rule == REPLACE ? (degree ? h->k : 0) : degree;
  tally(b->count, h->row_sums, h->rows, i, h->k < 0 || least < h->k ? least : h->k);
}
// Find where the edges of row i begin, and write it; of i = N where they end.
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
    else if (b->table[b->edge_times ? b->local[i] : seed] != b->input[2] + i) report(b, REPEATED);
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
// The slot of a pair in the hash table: its own, or the first free one behind.
FN i64 slot_of(const batch_t *b, ID node, i64 group) {
  u64 pair = (u64)node + (u64)b->V * (u64)group;
  for (u64 at = mix(pair);; at++) {
    u64 slot = at & (u64)(b->slots - 1), there = atomicCAS(&b->pairs[slot], NO_PAIR, pair);
    if (there == NO_PAIR || there == pair) return (i64)slot;
  }
}
// As put_edge, for a source at a time; `local` has its slot instead of the node.
FN void put_pair(const batch_t *b, i64 position, ID node, i64 group) {
  i64 slot = slot_of(b, node, group);
  b->local[position] = (ID)slot;
  atomicMin(&b->table[slot], (int)(b->input[2] + position));
}
FN void know_time(const batch_t *b, i64 i, i64 group) {
  b->group[i] = (int)group;
  b->src_times[i] = b->input[3 + 2 * b->input[1] + group];
}

// The seeds take the first positions. counts: count the edges of their rows as well.
KERNEL begin(batch_t b, part_t h, i64 hops, i64 counts) {
  THREAD(h.rows < hops ? hops : h.rows);
  if (i < hops) b.keys[i] = mix(mix(mix(b.seed) ^ (u64)b.input[0]) ^ (u64)(b.one_draw ? 0 : i));
  if (i == 0) {
    b.sizes[0] = 0;
    b.sizes[1] = b.input[1];
  }
  if (i >= b.input[1]) return;
  i64 seed = b.input[3 + i];
  int known = seed >= 0 && seed < b.V;
  b.src[i] = known ? (ID)seed : 0;
  b.number[i] = (int)i;
  if (b.edge_times) {
    know_time(&b, i, b.input[3 + b.input[1] + i]);
    if (known) put_pair(&b, i, (ID)seed, b.group[i]);
  } else if (known) atomicMin(&b.table[seed], (int)(b.input[2] + i));
  if (counts) count_by_degree(&b, &h, i, b.src[i]);
}
KERNEL count(batch_t b, part_t h) {
  THREAD(b.sizes[1 + 2 * h.hop]);
  hop_t hop = law_of(&b, &h);
  row_t row = row_of(&b, i);
  tally(b.count, h.row_sums, h.rows, i, count_row(&hop, &row));
}
// Any rule, any fanout: the edges; edges and best are scratch here.
KERNEL pick(batch_t b, part_t h) {
  THREAD(h.rows + 1);
  i64 N = b.sizes[1 + 2 * h.hop], at = open_row(&b, &h, i, N);
  if (i >= N) return;
  hop_t hop = law_of(&b, &h);
  row_t row = row_of(&b, i);
  i64 n = edges_of(&b, &h, i, at), first = h.first + at, *edges = b.edges + first;
  if (b.edge_times) for (i64 j = 0; j < n; j++) b.number[first + j] = b.group[i];  // for `claim`
  if (n == b.count[i]) pick_row(&hop, (u64)b.src[i], &row, n, edges, b.best + first);
  else for (i64 j = 0; j < n; j++) edges[j] = row.start;  // no room: the batch will be made again
}
// The nodes of the picked edges, which bid for them.
KERNEL claim(batch_t b, part_t h) {
  THREAD(b.sizes[2 + 2 * h.hop]);
  ID node = b.indices[b.edges[h.first + i]];
  if (outside(&b, node)) *b.damaged = 1;
  node = outside(&b, node) ? 0 : node;
  if (b.edge_times && h.relabel) put_pair(&b, h.first + i, node, b.number[h.first + i]);
  else put_edge(&b, &h, i, node);
}
// Which of 32 edges won their nodes.
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
// Number the nodes whose edge won. counts: count the rows of `next` as well, whose destinations are those of this hop
// and the nodes that get a number here.
KERNEL number(batch_t b, part_t h, part_t next, i64 counts) {
  THREAD(32 * h.words < h.rows ? h.rows : 32 * h.words);
  i64 N = b.sizes[1 + 2 * h.hop], last = 32 * h.words - 1;
  unsigned won = i <= last ? b.won[i / 32] : 0, mine = won >> i % 32 & 1;
  if (mine || i == last) {
    i64 at = N + before(b.wins, h.word_sums, h.words, i / 32) + ones(won & ((1u << i % 32) - 1));
    if (mine && at < h.next_rows) {
      ID node = b.local[h.first + i];
      if (b.edge_times) {
        u64 pair = b.pairs[node];
        know_time(&b, at, (i64)(pair / (u64)b.V));
        node = (ID)(pair % (u64)b.V);
      }
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
// Give each edge of the first `hops` hops (positions start .. end - 1) the number of its node, -1 where there is no
// edge; set all sums to zero for the next batch.
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
    """CUDA source of the sampler for ids of a dtype; law: C, `LAW` of sampler_law.py."""
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
