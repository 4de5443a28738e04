// A batch in GPU memory, its hops, and how neighbours of a row are drawn and read there: for
// sampler.cu and aggregate.cu.
#include "rule.h"

enum { REPEATED = 1, UNKNOWN = 2, FULL = 4 };  // bits of trouble
#define NO_PAIR (~0ULL)
// A batch of L hops: the graph it is drawn from, its results and its working memory.
typedef struct {
  const i64 *indptr;
  const ID *indices;
  const WEIGHT *weights;
  i64 V, M, rule, one_draw;
  u64 seed;
  const i64 *input;  // step; S; offset of positions in the table (see sampler_gpu.py); seeds [S]
  ID *src;           // source nodes of all hops: those of a hop are the first N
  ID *local;         // by position: source node of an edge, in the end its local id
  i64 *edges;        // by position: edge in the graph's indices; null: not asked for
  double *best;      // by position: scratch of weighted draws
  int *table;        // [V] the smallest position that bids for a node, plus the offset
  int *number;       // by position: local id of the node that first appears there
  int *count;        // edges of each row of the current hop
  unsigned *won;
  int *wins;    // per 32 edges of the current hop: which won their nodes, and how many
  u64 *keys;    // [L] of the hops, see hop_key in sampler.py
  i64 *sizes;   // [2 + 2 L] trouble, S, then E and N of each hop
  i64 *wanted;  // [2 L] E and N as they would be with enough room
  i64 *first;   // [L] position of a hop's first edge
  const i64 *excluded;
  i64 num_excluded;  // edges, ascending
  const i64 *edge_times;  // [M]; null: no times
  i64 strict, window;
  const void *types;   // TYPE [M]; null: edges have none
  const i64 *fanouts;  // [L, num_types] k
  i64 num_types;       // all values of a TYPE
  i64 *src_times;      // of the source nodes if edges have times, as are group and pairs
  int *group;    // index of a source's time among the batch's, which follow the seeds in input
  u64 *pairs;    // [slots] node + V * group of each slot of table, NO_PAIR if it is free
  i64 slots;     // a power of two
  i64 *damaged;  // [1] nonzero once the graph was seen to be damaged: `begin` clears sizes[0], but
                 // not this
} batch_t;
// A hop of a batch.
typedef struct {
  i64 hop, k, relabel;
  i64 rows, places, words;  // room for its destinations, its edges, and words of 32 edges
  i64 next_rows;            // room for its sources
  i64 first;                // position of its first edge
  ID *offsets;              // [rows + 1] of the block
  u64 *row_sums, *word_sums;
} part_t;

// Damage on disk must not crash the process: offsets and ids that are out of range are not used to
// read.
FN i64 degree_of(const batch_t *b, i64 v) {
  i64 start = b->indptr[v], end = b->indptr[v + 1];
  if (0 <= start && start <= end && end <= b->M && end - start < 1LL << 31) return end - start;
  *b->damaged = 1;
  return 0;
}
FN law_t law_of(const batch_t *b, const part_t *h) {
  law_t hop = {b->indptr, b->indices, b->weights, b->rule, h->k, b->keys[h->hop], b->types};
  if (b->types) hop.fanout = b->fanouts + h->hop * b->num_types;
  hop.edge_times = b->edge_times;
  hop.strict = b->strict;
  hop.window = b->window;
  return hop;
}
FN row_t row_of(const batch_t *b, const law_t *hop, i64 i) {  // of source i
  i64 v = b->src[i];
  row_t row = {b->indptr[v], degree_of(b, v), 0, 0, b->edge_times ? b->src_times[i] : 0};
  if (b->edge_times && !b->types) cut_by_time(&row, hop, row.time);
  if (b->num_excluded) exclude(&row, b->excluded, b->num_excluded);
  if (b->types) row.degree += row.num_gaps;
  return row;
}
FN int outside(const batch_t *b, ID node) { return (u64)(i64)node >= (u64)b->V; }

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
  UNROLL for (int j = 0; j < most; j++) node[j] = j < n ? b->indices[start + place[j]] : 0;
  UNROLL for (int j = 0; j < most; j++) damaged |= outside(b, node[j]);
  if (!damaged) return;
  *b->damaged = 1;
  UNROLL for (int j = 0; j < most; j++) node[j] = 0;
}
