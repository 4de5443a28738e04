// The kernels that make a batch; the docstring of sampler_gpu.py says what each does and when it
// runs. They need nothing beyond atomics.
#include "batch.h"

FN void report(const batch_t *b, u64 status) { atomicOr(&b->outcome->status, status); }

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
// The sum of counts 0 .. i - 1, all of which have come, by a warp: i is the same for all its threads.
FN i64 before(const int *count, const u64 *sums, i64 n, i64 i) {
  const u64 *large = sums + n / 64 + 1;
  u64 sum = 0;
  for (i64 q = LANE; q < i / 4096; q += WARP) sum += large[q];
  ONE_BY_ONE for (i64 q = i / 4096 * 64 + LANE; q < i / 64; q += WARP) sum += sums[q] % COME;
  ONE_BY_ONE for (i64 q = i / 64 * 64 + LANE; q < i; q += WARP) sum += (unsigned)count[q];
  return (i64)sum_of_warp(sum);
}

// Count the edges of a row by a rule of positions, without cuts or a split.
FN void count_by_degree(const batch_t *b, const part_t *part, i64 i, ID v) {
  hop_t hop = {0, part->k};
  row_t row = {0, degree_of(b, v)};
  tally(b->count, part->row_sums, part->rows, i, count_list(&b->spec, &hop, &row));
}
// Threads that open rows: one more than there are, in whole warps.
#define OPENING(rows) ((rows) / WARP * WARP + WARP)
// Write where the edges of row i begin, or, for i = N, where the last row's end -> that place.
FN i64 open_row(const batch_t *b, const part_t *part, i64 i, i64 N) {
  i64 first = i - LANE;  // of the warp
  i64 wanted = before(b->count, part->row_sums, part->rows, first < N ? first : N);
  wanted += before_in_warp(i < N ? b->count[i] : 0);
  i64 at = wanted < part->places ? wanted : part->places;
  if (i <= part->rows) part->offsets[i] = (ID)at;
  if (i == N) {
    part->state->num_edges = at;
    part->state->wanted = wanted;
    part->state->first = part->first;
    part->state->sources = part->sources;
    if (at < wanted) report(b, FULL);
  } else if (i < N && part->index == 0) {  // all seeds have bid for their nodes
    i64 seed = b->seeds[i];
    if (seed < 0 || seed >= b->spec.V) report(b, UNKNOWN);
    else if (b->table[b->pairs ? b->local[i] : seed] != b->input->offset + i)
      report(b, REPEATED);
  }
  return at;
}
FN i64 edges_of(const batch_t *b, const part_t *part, i64 i, i64 at) {
  return b->count[i] < part->places - at ? b->count[i] : part->places - at;
}
FN void put_edge(const batch_t *b, const part_t *part, i64 place, ID node) {
  i64 position = part->first + place;
  b->local[position] = node;
  if (part->relabel) atomicMin(&b->table[node], (int)(b->input->offset + position));
}
// The hop of a position, or -1 in the padding.
FN i64 hop_at(const batch_t *b, i64 hops, i64 position) {
  i64 of = -1;
  for (i64 hop = 0; hop < hops; hop++) {
    i64 place = position - b->states[hop].first;
    if (0 <= place && place < b->states[hop].num_edges) of = hop;
  }
  return of;
}
// The slot of a pair in the hash table: the one it has, or the first free one from its hash on.
FN i64 slot_of(const batch_t *b, ID node, i64 group) {
  u64 pair = (u64)node + (u64)b->spec.V * (u64)group;
  for (u64 at = mix(pair);; at++) {
    u64 slot = at & (u64)(b->slots - 1), there = atomicCAS(&b->pairs[slot], NO_PAIR, pair);
    if (there == NO_PAIR || there == pair) return (i64)slot;
  }
}
// put_edge for a source that is a pair, by position; `local` has its slot instead of the node.
FN void put_pair(const batch_t *b, i64 position, ID node, i64 group) {
  i64 slot = slot_of(b, node, group);
  b->local[position] = (ID)slot;
  atomicMin(&b->table[slot], (int)(b->input->offset + position));
}
FN void know_group(const batch_t *b, i64 i, i64 group) {
  b->group[i] = (int)group;
  if (b->spec.edge_times) b->src_times[i] = b->times[group];
  if (b->src_seed) b->src_seed[i] = (ID)group;
}

// Make the hops' keys, put the seeds at the first positions and look up their labels; empty the lists.
// counts: also count the edges of the seeds.
KERNEL begin(batch_t b, part_t part, i64 hops, i64 counts, i64 threads) {
  THREAD(threads);
  if (i < b.num_sizes) b.size[i] = 0;
  if ((u64)i < part.rows * b.label_bytes) {
    u64 row = (u64)i / b.label_bytes, at = (u64)i % b.label_bytes;
    u64 seed = (i64)row < b.input->num_seeds ? (u64)b.seeds[row] : ~0ULL;
    const unsigned char *labels = (const unsigned char *)b.labels;
    ((unsigned char *)b.y)[i] = seed < (u64)b.spec.V ? labels[seed * b.label_bytes + at] : 255;
  }
  u64 hop = (u64)(b.one_draw ? 0 : i);
  if (i < hops) b.states[i].key = mix(mix(mix(b.seed) ^ (u64)b.input->key_step) ^ hop);
  if (i == 0) {
    b.outcome->status = b.input->num_excluded > b.excludes ? FULL : 0;
    b.states[0].num_dst = b.input->num_seeds;
  }
  if (i >= b.input->num_seeds) return;
  i64 node = b.seeds[i];
  int known = node >= 0 && node < b.spec.V;
  b.src[i] = known ? (ID)node : 0;
  b.number[i] = (int)i;
  if (b.pairs) {
    know_group(&b, i, b.groups ? b.groups[i] : i);
    if (known) put_pair(&b, i, (ID)node, b.group[i]);
  } else if (known) atomicMin(&b.table[node], (int)(b.input->offset + i));
  if (POSITIONS && counts) count_by_degree(&b, &part, i, b.src[i]);
}
KERNEL count(batch_t b, part_t part) {
  THREAD(part.state->num_dst);
  hop_t hop = hop_of(&b, &part, i);
  row_t row = row_of(&b, i);
  i64 count = count_row(&b.spec, &hop, &row);
  if (count == NO_TYPE) b.outcome->damaged = 1;
  tally(b.count, part.row_sums, part.rows, i, count == NO_TYPE ? 0 : count);
}
// Pick edges by any rule and fanout; needs the memory of `edges` and, if weighted, `best`.
KERNEL pick(batch_t b, part_t part) {
  THREAD(OPENING(part.rows));
  i64 N = part.state->num_dst, at = open_row(&b, &part, i, N);
  if (i >= N) return;
  hop_t hop = hop_of(&b, &part, i);
  row_t row = row_of(&b, i);
  i64 n = edges_of(&b, &part, i, at), first = part.first + at, *edges = b.edges + first;
  if (b.pairs)
    for (i64 j = 0; j < n; j++) b.number[first + j] = b.group[i];  // for `claim`
  if (part.edge_dst)
    for (i64 j = 0; j < n; j++) part.edge_dst[at + j] = (int)i;
  if (n == b.count[i]) pick_row(&b.spec, &hop, (u64)b.src[i], &row, n, edges, b.best + first);
  else
    for (i64 j = 0; j < n; j++) edges[j] = row.start;  // no room: the batch will be sampled again
}
// Read the nodes of the picked edges and bid for them.
KERNEL claim(batch_t b, part_t part) {
  THREAD(part.state->num_edges);
  ID node = b.spec.indices[b.edges[part.first + i]];
  if (outside(&b, node)) b.outcome->damaged = 1;
  node = outside(&b, node) ? 0 : node;
  if (b.pairs && part.relabel) put_pair(&b, part.first + i, node, b.number[part.first + i]);
  else put_edge(&b, &part, i, node);
}
// Find out which of 32 edges won their nodes: a warp has an edge each.
KERNEL mark(batch_t b, part_t part) {
  THREAD(part.words * WARP);
  i64 word = i / WARP, E = part.state->num_edges;
  unsigned won = 0;
  for (int a = LANE; a < 32; a += WARP) {
    i64 place = 32 * word + a, position = part.first + place;
    won |= votes(place < E && b.table[b.local[position]] == (int)(b.input->offset + position), a);
  }
  if (LANE) return;
  b.won[word] = won;
  tally(b.wins, part.word_sums, part.words, word, __popc(won));
}
// Number the nodes of the edges that won. counts: also count the edges of hop `next`, whose
// destinations are those of this hop and the nodes numbered here.
KERNEL number(batch_t b, part_t part, part_t next, i64 counts) {
  THREAD(32 * part.words < part.rows ? part.rows : 32 * part.words);
  i64 N = part.state->num_dst, last = 32 * part.words - 1;
  unsigned won = i <= last ? b.won[i / 32] : 0, mine = won >> i % 32 & 1;
  i64 earlier = 0;
  if (won || i / 32 == last / 32) earlier = before(b.wins, part.word_sums, part.words, i / 32);
  if (mine || i == last) {
    i64 at = N + earlier + __popc(won & ((1u << i % 32) - 1));
    if (mine && at < part.next_rows) {
      ID node = b.local[part.first + i];
      if (b.pairs) {
        u64 pair = b.pairs[node];
        know_group(&b, at, (i64)(pair / (u64)b.spec.V));
        node = (ID)(pair % (u64)b.spec.V);
      }
      b.number[part.first + i] = (int)at;
      b.src[at] = node;
      if (POSITIONS && counts) count_by_degree(&b, &next, at, node);
    }
    if (i == last) {
      i64 wanted = at + mine;
      part.state[1].num_dst = wanted < part.next_rows ? wanted : part.next_rows;
      if (wanted > part.next_rows) report(&b, FULL);
    }
  }
  if (POSITIONS && counts && i < N) count_by_degree(&b, &next, i, b.src[i]);
}
// Replace the node of each edge of the first `hops` hops (positions start .. end - 1) by its local
// id, or -1 in the padding, and add it to the list of its source; set all sums to zero for the next
// batch.
KERNEL finish(batch_t b, i64 hops, i64 start, i64 end, u64 *sums, i64 num_sums) {
  THREAD(end < num_sums ? num_sums : end);
  if (i < num_sums) sums[i] = 0;
  if (i < start || i >= end) return;
  i64 hop = hop_at(&b, hops, i);
  ID id = hop < 0 ? -1 : b.number[b.table[b.local[i]] - b.input->offset];
  b.local[i] = id;
  if (0 <= hop && hop < b.listed) b.slot[i] = atomicAdd(&b.size[b.states[hop].sources + id], 1);
}
// Put the edges of the first hops into the lists of their sources, as `list_edges` of layers.cu does.
// start: the prefix sums of sizes.
KERNEL list_hops(batch_t b, i64 end, const int *start, int *list) {
  THREAD(end);
  i64 hop = hop_at(&b, b.listed, i);
  if (hop < 0) return;
  const state_t *state = b.states + hop;
  list[start[state->sources + b.local[i]] + b.slot[i]] = (int)(i - state->first);
}

// Count the edges that nodes see at these times; 0 for those below 0, which are padding.
KERNEL degrees_at(batch_t b, i64 n, const ID *nodes, const i64 *times, i64 *degrees) {
  THREAD(n);
  degrees[i] = 0;
  if (nodes[i] < 0) return;
  row_t row = {b.spec.indptr[nodes[i]], degree_of(&b, nodes[i])};
  cut_by_time(&row, &b.spec, times[i]);
  degrees[i] = row.degree;
}
FN void pick_up_to(const int most, const batch_t *b, const part_t *part) {
  THREAD(OPENING(part->rows));
  i64 N = part->state->num_dst, at = open_row(b, part, i, N);
  if (!POSITIONS || i >= N) return;
  ID v = b->src[i], node[MOST];
  i64 start = b->spec.indptr[v];
  int n = (int)edges_of(b, part, i, at);
  unsigned place[MOST];
  choose(most, part->state->key, v, (unsigned)(b->spec.indptr[v + 1] - start), (unsigned)part->k, n,
         b->spec.rule == REPLACE, place);
  if (b->edges) {
    UNROLL for (int j = 0; j < most; j++) if (j < n)
      b->edges[part->first + at + j] = start + place[j];
  }
  read_nodes(most, b, start, place, n, node);
  UNROLL for (int j = 0; j < most; j++) if (j < n) {
    put_edge(b, part, at + j, node[j]);
    if (part->edge_dst) part->edge_dst[at + j] = (int)i;
  }
}
KERNEL pick_8(batch_t b, part_t part) { pick_up_to(8, &b, &part); }
KERNEL pick_16(batch_t b, part_t part) { pick_up_to(16, &b, &part); }
KERNEL pick_32(batch_t b, part_t part) { pick_up_to(32, &b, &part); }
KERNEL pick_64(batch_t b, part_t part) { pick_up_to(64, &b, &part); }
