// A batch in GPU memory, its hops, and how neighbours of a row are drawn and read there: for
// sampler.cu and aggregate.cu.
#include "rule.h"

enum { REPEATED = 1, UNKNOWN = 2, FULL = 4 };  // bits of status
#define NO_PAIR (~0ULL)
typedef struct {  // what the host sends; offset: of positions in the table, see sampler_gpu.py
  i64 step, num_seeds, offset, num_excluded;
  i64 key_step;  // the step of the hops' keys
} input_t;
typedef struct {  // what the host hears of a batch, beside the sizes of its hops
  u64 status;
  i64 damaged;  // nonzero once the graph was seen to be damaged: `begin` does not clear this
} outcome_t;
// A hop, as the kernels get to know it.
typedef struct {
  u64 key;                 // see hop_key in sampler.py
  i64 num_dst, num_edges;  // sources are the destinations of the next hop
  i64 wanted;              // number of edges as it would be with enough room
  i64 first;               // position of its first edge
  i64 sources;             // where the lists of its edges by source begin, if they are wanted
} state_t;
// A batch of L hops: the graph it is drawn from, its results and its working memory.
typedef struct {
  spec_t spec;
  i64 one_draw;
  u64 seed;
  const input_t *input;
  const i64 *seeds;   // [S]
  const i64 *groups;  // [S] of the seeds: first index of their time in times; null: their position
  const i64 *times;   // [S] the times of the seeds, ascending if there are groups
  outcome_t *outcome;
  state_t *states;  // [L + 1] of the hops; the last has the sources of the outermost hop
  ID *src;          // source nodes of all hops: those of a hop are the first num_dst of the next
  ID *local;        // by position: source node of an edge, in the end its local id
  i64 *edges;       // by position: edge in the graph's indices; null: not asked for
  double *best;     // by position: scratch of weighted draws
  int *table;       // [V] the smallest position that bids for a node, plus the offset
  int *number;      // by position: local id of the node that first appears there
  int *count;       // edges of each row of the current hop
  unsigned *won;
  int *wins;  // per 32 edges of the current hop: which won their nodes, and how many
  const i64 *excluded;  // edges, ascending; num_excluded of input
  i64 excludes;         // room for them; 0: they are not looked at
  i64 *src_times;       // of the source nodes if edges have times
  ID *src_seed;         // of the source nodes, position of the seed; null: not disjoint
  int *group;           // of the source nodes, if they are pairs: with times, or if disjoint
  u64 *pairs;           // [slots] node + V * group of each slot of table, NO_PAIR if it is free
  i64 slots;            // a power of two
  const void *labels;  // [V, label_bytes] bytes
  void *y;             // [S, label_bytes] those of the seeds, all bits 1 in the padding
  u64 label_bytes;
  int *size;  // edges of each source, of the hops up to `listed`
  int *slot;  // by position: index of an edge in the list of its source, in any order
  i64 listed, num_sizes;
} batch_t;
// The part of a batch's memory that a hop has.
typedef struct {
  i64 index, k, relabel;    // of the hop
  i64 rows, places, words;  // room for its destinations, its edges, and words of 32 edges
  i64 next_rows;            // room for its sources
  i64 first, sources;       // as in state_t
  int *edge_dst;            // [places] destination of each edge; null: not asked for
  state_t *state;           // its own, then that of the next hop
  ID *offsets;              // [rows + 1] of the block
  u64 *row_sums, *word_sums;
} part_t;

// Damage on disk must not crash the process: offsets and ids that are out of range are not used to
// read.
FN i64 degree_of(const batch_t *b, i64 v) {
  i64 start = b->spec.indptr[v], end = b->spec.indptr[v + 1];
  if (0 <= start && start <= end && end <= b->spec.M && end - start < 1LL << 31) return end - start;
  b->outcome->damaged = 1;
  return 0;
}
FN hop_t hop_of(const batch_t *b, const part_t *part, i64 i) {  // for source i
  hop_t hop = {part->index, part->k, part->state->key};
  if (b->src_seed) hop.key = mix(hop.key ^ (u64)b->seeds[b->group[i]]);
  return hop;
}
FN row_t row_of(const batch_t *b, i64 i) {  // of source i
  i64 v = b->src[i];
  row_t row = {b->spec.indptr[v], degree_of(b, v), 0, 0, b->spec.edge_times ? b->src_times[i] : 0};
  if (b->spec.edge_times && !b->spec.types) cut_by_time(&row, &b->spec, row.time);
  if (b->excludes) {
    i64 n = b->input->num_excluded;
    exclude(&row, b->excluded, n < b->excludes ? n : b->excludes);
  }
  if (b->spec.types) row.degree += row.num_gaps;
  return row;
}
FN int outside(const batch_t *b, ID node) { return (u64)(i64)node >= (u64)b->spec.V; }

// ---- fanouts up to MOST, uniform and with replacement
//
// All loads of a row are in flight at once; picks are held in registers. `most`, a constant at each
// call, is the number of picks that loops are unrolled to.

#define MOST 64
FN void choose(const int most, u64 key, ID v, unsigned degree, unsigned k, int n, int replace,
               unsigned *place) {
  u64 hash = mix(key ^ (u64)v);
  UNROLL for (int j = 0; j < most; j++) if (j < n) {
    unsigned pick = j, last = degree - k + j;
    if (replace) pick = (unsigned)below(mix(hash ^ (u64)j) >> 32, degree);
    else if (degree > k) {  // Floyd, as pick_list does it
      pick = (unsigned)below(mix(hash ^ (u64)j) >> 32, (i64)last + 1);
      UNROLL for (int q = 0; q < j; q++) pick = place[q] == pick ? last : pick;
    }
    place[j] = pick;
  }
}
FN void read_nodes(const int most, const batch_t *b, i64 start, const unsigned *place, int n,
                   ID *node) {
  int damaged = 0;
  UNROLL for (int j = 0; j < most; j++) node[j] = j < n ? b->spec.indices[start + place[j]] : 0;
  UNROLL for (int j = 0; j < most; j++) damaged |= outside(b, node[j]);
  if (!damaged) return;
  b->outcome->damaged = 1;
  UNROLL for (int j = 0; j < most; j++) node[j] = 0;
}
