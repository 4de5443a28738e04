// The kernels that make a batch; the docstring of sampler_gpu.py says what each does and when it
// runs. They need nothing beyond atomics.
#include "batch.h"

FN void report(const batch_t *b, u64 trouble) { atomicOr((u64 *)b->sizes, trouble); }

// Set count i of n, and add it to the sum of its 64 counts, whose upper bits say how many have come. The
// last of the 64 adds their sum to that of 4,096 counts: thousands of atomics on one address would wait
// for each other. A sum without all of its counts is no part of the larger one, and of no prefix.
#define COME (1ULL << 48)
FN void tally(int *count, u64 *sums, i64 n, i64 i, i64 value) {
  count[i] = (int)value;
  const u64 others = atomicAdd(&sums[i / 64], COME + (u64)value);
  if (others / COME == 63)
    atomicAdd(&sums[n / 64 + 1 + i / 4096], others % COME + (u64)value);
}
// The sum of counts 0 .. i - 1, all of which have come.
FN i64 before(const int *count, const u64 *sums, i64 n, i64 i) {
  const u64 *large = sums + n / 64 + 1;
  i64 sum = 0;
  for (i64 q = 0; q < i / 4096; q++) sum += large[q];
  for (i64 q = i / 4096 * 64; q < i / 64; q++) sum += sums[q] % COME;
  for (i64 q = i / 64 * 64; q < i; q++) sum += count[q];
  return sum;
}

// Count the edges of a row if its degree is enough for that: rules UNIFORM and REPLACE, without
// excluded edges.
FN void count_by_degree(const batch_t *b, const part_t *h, i64 i, ID v) {
  i64 degree = degree_of(b, v), least = b->rule == REPLACE ? (degree ? h->k : 0) : degree;
  tally(b->count, h->row_sums, h->rows, i, h->k < 0 || least < h->k ? least : h->k);
}
// Write where the edges of row i begin, or, for i = N, where the last row's end -> that place.
FN i64 open_row(const batch_t *b, const part_t *h, i64 i, i64 N) {
  i64 wanted = before(b->count, h->row_sums, h->rows, i < N ? i : N);
  i64 at = wanted < h->places ? wanted : h->places;
  h->offsets[i] = (ID)at;
  if (i == N) {
    b->sizes[2 + 2 * h->hop] = at;
    b->wanted[2 * h->hop] = wanted;
    b->first[h->hop] = h->first;
    if (at < wanted) report(b, FULL);
  } else if (i < N && h->hop == 0) {  // all seeds have bid for their nodes
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
// The slot of a pair in the hash table: the one it has, or the first free one from its hash on.
FN i64 slot_of(const batch_t *b, ID node, i64 group) {
  u64 pair = (u64)node + (u64)b->V * (u64)group;
  for (u64 at = mix(pair);; at++) {
    u64 slot = at & (u64)(b->slots - 1), there = atomicCAS(&b->pairs[slot], NO_PAIR, pair);
    if (there == NO_PAIR || there == pair) return (i64)slot;
  }
}
// put_edge for a (node, time) source, by position; `local` has its slot instead of the node.
FN void put_pair(const batch_t *b, i64 position, ID node, i64 group) {
  i64 slot = slot_of(b, node, group);
  b->local[position] = (ID)slot;
  atomicMin(&b->table[slot], (int)(b->input[2] + position));
}
FN void know_time(const batch_t *b, i64 i, i64 group) {
  b->group[i] = (int)group;
  b->src_times[i] = b->input[3 + 2 * b->input[1] + group];
}

// Make the hops' keys and put the seeds at the first positions. counts: also count their edges.
KERNEL begin(batch_t b, part_t h, i64 hops, i64 counts) {
  THREAD(h.rows < hops ? hops : h.rows);
  if (i < hops) b.keys[i] = mix(mix(mix(b.seed) ^ (u64)b.input[0]) ^ (u64)(b.one_draw ? 0 : i));
  if (i == 0) {
    b.sizes[0] = 0;
    b.sizes[1] = b.input[1];
  }
  if (i >= b.input[1]) return;
  i64 node = b.input[3 + i];
  int known = node >= 0 && node < b.V;
  b.src[i] = known ? (ID)node : 0;
  b.number[i] = (int)i;
  if (b.edge_times) {
    know_time(&b, i, b.input[3 + b.input[1] + i]);
    if (known) put_pair(&b, i, (ID)node, b.group[i]);
  } else if (known) atomicMin(&b.table[node], (int)(b.input[2] + i));
  if (counts) count_by_degree(&b, &h, i, b.src[i]);
}
KERNEL count(batch_t b, part_t h) {
  THREAD(b.sizes[1 + 2 * h.hop]);
  law_t hop = law_of(&b, &h);
  row_t row = row_of(&b, &hop, i);
  i64 count = count_row(&hop, &row);
  if (count == NO_TYPE) *b.damaged = 1;
  tally(b.count, h.row_sums, h.rows, i, count == NO_TYPE ? 0 : count);
}
// Pick edges by any rule and fanout; needs the memory of `edges` and, if weighted, `best`.
KERNEL pick(batch_t b, part_t h) {
  THREAD(h.rows + 1);
  i64 N = b.sizes[1 + 2 * h.hop], at = open_row(&b, &h, i, N);
  if (i >= N) return;
  law_t hop = law_of(&b, &h);
  row_t row = row_of(&b, &hop, i);
  i64 n = edges_of(&b, &h, i, at), first = h.first + at, *edges = b.edges + first;
  if (b.edge_times)
    for (i64 j = 0; j < n; j++) b.number[first + j] = b.group[i];  // for `claim`
  if (n == b.count[i]) pick_row(&hop, (u64)b.src[i], &row, n, edges, b.best + first);
  else
    for (i64 j = 0; j < n; j++) edges[j] = row.start;  // no room: the batch will be sampled again
}
// Read the nodes of the picked edges and bid for them.
KERNEL claim(batch_t b, part_t h) {
  THREAD(b.sizes[2 + 2 * h.hop]);
  ID node = b.indices[b.edges[h.first + i]];
  if (outside(&b, node)) *b.damaged = 1;
  node = outside(&b, node) ? 0 : node;
  if (b.edge_times && h.relabel) put_pair(&b, h.first + i, node, b.number[h.first + i]);
  else put_edge(&b, &h, i, node);
}
// Find out which of 32 edges won their nodes.
KERNEL mark(batch_t b, part_t h) {
  THREAD(h.words);
  i64 E = b.sizes[2 + 2 * h.hop], place = 32 * i;
  const ID *local = b.local + h.first;
  int bid = (int)(b.input[2] + h.first + place);
  unsigned won = 0;
  for (int a = 0; a < 32; a += 8) {
    int smallest[8];
    UNROLL for (int q = 0; q < 8; q++) smallest[q] =
        place + a + q < E ? b.table[local[place + a + q]] : -1;
    UNROLL for (int q = 0; q < 8; q++) won |= (unsigned)(smallest[q] == bid + a + q) << (a + q);
  }
  b.won[i] = won;
  tally(b.wins, h.word_sums, h.words, i, __popc(won));
}
// Number the nodes of the edges that won. counts: also count the edges of hop `next`, whose
// destinations are those of this hop and the nodes numbered here.
KERNEL number(batch_t b, part_t h, part_t next, i64 counts) {
  THREAD(32 * h.words < h.rows ? h.rows : 32 * h.words);
  i64 N = b.sizes[1 + 2 * h.hop], last = 32 * h.words - 1;
  unsigned won = i <= last ? b.won[i / 32] : 0, mine = won >> i % 32 & 1;
  if (mine || i == last) {
    i64 at = N + before(b.wins, h.word_sums, h.words, i / 32) + __popc(won & ((1u << i % 32) - 1));
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
// Replace the node of each edge of the first `hops` hops (positions start .. end - 1) by its local
// id, or -1 in the padding; set all sums to zero for the next batch.
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

FN void pick_up_to(const int most, const batch_t *b, const part_t *h) {
  THREAD(h->rows + 1);
  i64 N = b->sizes[1 + 2 * h->hop], at = open_row(b, h, i, N);
  if (i >= N) return;
  ID v = b->src[i], node[MOST];
  i64 start = b->indptr[v];
  int n = (int)edges_of(b, h, i, at);
  unsigned place[MOST];
  choose(most, b->keys[h->hop], v, (unsigned)(b->indptr[v + 1] - start), (unsigned)h->k, n,
         b->rule == REPLACE, place);
  if (b->edges) {
    UNROLL for (int j = 0; j < most; j++) if (j < n) b->edges[h->first + at + j] = start + place[j];
  }
  read_nodes(most, b, start, place, n, node);
  UNROLL for (int j = 0; j < most; j++) if (j < n) put_edge(b, h, at + j, node[j]);
}
KERNEL pick_8(batch_t b, part_t h) { pick_up_to(8, &b, &h); }
KERNEL pick_16(batch_t b, part_t h) { pick_up_to(16, &b, &h); }
KERNEL pick_32(batch_t b, part_t h) { pick_up_to(32, &b, &h); }
KERNEL pick_64(batch_t b, part_t h) { pick_up_to(64, &b, &h); }
