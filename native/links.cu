// Negatives and the edges of pairs, for extras/ranking.py and extras/edge_split.py, where the law is
// written as torch operations.
#include "rule.h"

// The index in sources of the first edge source -> destination, or where it would be.
FN i64 place_of(const i64 *indptr, const ID *sources, i64 source, i64 destination) {
  i64 place = indptr[destination];
  BISECT(place, indptr[destination + 1] - place, sources[at] < source)
  return place;
}
FN int is_edge(const i64 *indptr, const ID *sources, i64 source, i64 destination) {
  i64 place = place_of(indptr, sources, source, destination);
  return place < indptr[destination + 1] && sources[place] == source;
}

// Find the edges between the nodes of each of P pairs: first those of its direction, then, from P
// on, the reverse ones.
KERNEL between(const i64 *pairs, i64 P, const i64 *indptr, const ID *sources, i64 *first,
               i64 *counts) {
  THREAD(2 * P);
  const i64 *pair = pairs + 2 * (i % P);
  i64 source = pair[i / P], destination = pair[1 - i / P];
  first[i] = place_of(indptr, sources, source, destination);
  counts[i] = place_of(indptr, sources, source + 1, destination) - first[i];
}

// Draw negative `i % count` of pair `i / count`, up to `tries` times -> whether the last one is bad,
// too. sources: null if edges are allowed. ends: where the node ids of each type end, after a 0.
// upto: [V + 1] sums of weights; null: all nodes weigh the same.
KERNEL negatives(const i64 *pairs, const i64 *numbers, i64 n, i64 count, i64 tries, u64 key,
                 const i64 *indptr, const ID *sources, const i64 *ends, i64 types,
                 const i64 *upto, i64 *nodes, unsigned char *bad) {
  THREAD(n);
  i64 pair = i / count, source = pairs[2 * pair], node = source, wrong = 1;
  i64 type = lower_bound(ends + 1, types, pairs[2 * pair + 1] + 1);
  i64 first = ends[type], end = ends[type + 1];
  u64 hash = mix(key ^ (u64)numbers[pair]);
  for (i64 t = 0; wrong && t < tries; t++) {
    u64 bits = mix(hash ^ (u64)(i % count + t * count)) >> 11;
    if (upto) {
      double share = (double)(upto[end] - upto[first]) / 9007199254740992.0;  // of 2^53
      i64 place = upto[first] + (i64)((double)bits * share);
      node = first + lower_bound(upto + first + 1, end - first, place + 1);
    } else node = first + below(bits >> 21, end - first);
    wrong = node == source || (sources && is_edge(indptr, sources, source, node));
  }
  nodes[i] = node;
  bad[i] = wrong != 0;
}

// Whether the edge at a place of `sources` is there before a time (not strict: or at it).
FN int is_seen(const i64 *times, i64 place, i64 time, i64 strict) {
  return !times || (strict ? times[place] < time : times[place] <= time);
}
// Whether any of the edges from a node that follow each other from a place of `sources` on is seen.
FN int any_seen(const ID *sources, i64 place, i64 end, i64 node, const i64 *times, i64 time,
                i64 strict) {
  int seen = 0;
  for (; !seen && place < end && sources[place] == node; place++)
    seen = is_seen(times, place, time, strict);
  return seen;
}
// Add up weights [d, 4] over the common in-neighbours of each of P pairs, but its own nodes, by their
// degree d: sums [P, lanes, 4], 0 before, of so many threads. pair_times and times, those of `sources`:
// null: all edges are seen. ordered: the times of each list, ascending.
KERNEL common(const i64 *pairs, i64 P, i64 lanes, const i64 *indptr, const ID *sources,
              const i64 *pair_times, const i64 *times, const i64 *ordered, i64 strict,
              const float *weights, float *sums) {
  THREAD(P * lanes);
  i64 p = i / lanes, u = pairs[2 * p], v = pairs[2 * p + 1], time = pair_times ? pair_times[p] : 0;
  i64 few = indptr[u + 1] - indptr[u] <= indptr[v + 1] - indptr[v] ? u : v, many = u + v - few;
  const i64 first = indptr[few], end = indptr[few + 1];
  for (i64 place = first + i % lanes; place < end; place += lanes) {
    i64 node = sources[place];
    if (node == few || node == many || (place > first && sources[place - 1] == node)) continue;
    if (!any_seen(sources, place, end, node, times, time, strict)) continue;
    i64 other = place_of(indptr, sources, node, many);
    if (!any_seen(sources, other, indptr[many + 1], node, times, time, strict)) continue;
    i64 start = indptr[node], degree = indptr[node + 1] - start;
    if (times) {
      i64 until = start;
      BISECT(until, degree, is_seen(ordered, at, time, strict))
      degree = until - start;
    }
    UNROLL for (int c = 0; c < 4; c++) sums[4 * i + c] += weights[4 * degree + c];
  }
}

// Add up the weights of the nodes in the list of `few` that that of `many`, which is no shorter, has
// too, but for the four.
FN float shared(const i64 *indptr, const ID *sources, i64 few, i64 many, i64 u, i64 v,
                const float *weights) {
  i64 place = indptr[many], end = indptr[many + 1], last = -1;
  float sum = 0;
  for (i64 next = indptr[few]; next < indptr[few + 1]; next++) {
    const i64 node = sources[next];
    if (node == last || node == u || node == v || node == few || node == many) continue;
    last = node;
    i64 hop = 1;  // the node is at most so far on, if it is there
    while (place + hop < end && sources[place + hop] < node) hop *= 2;
    BISECT(place, min(hop, end - place), sources[at] < node)
    if (place < end && sources[place] == node) sum += weights[node];
  }
  return sum;
}
#ifdef HOST
#include <pthread.h>
enum { MOST = 1 << 22 };  // nodes that a thread may have sums of
static __thread double *steps;  // of weights[a] over u <- a <- b, for each b; 0 between pairs
static __thread i64 size;
static pthread_key_t ends;  // frees them when a thread ends: each epoch has threads of its own
__attribute__((constructor)) static void loaded(void) { pthread_key_create(&ends, free); }
// Add up these sums, or set them to 0.
static void walk(const i64 *indptr, const ID *sources, i64 u, const float *weights, int clear) {
  for (i64 one = indptr[u]; one < indptr[u + 1]; one++) {
    const i64 a = sources[one];
    if (a == u || !weights[a] || (one > indptr[u] && sources[one - 1] == a)) continue;
    for (i64 two = indptr[a]; two < indptr[a + 1]; two++) {
      const i64 b = sources[two];
      if (b == a || (two > indptr[a] && sources[two - 1] == b)) continue;
      steps[b] = clear ? 0 : steps[b] + weights[a];
    }
  }
}
#endif
// Sum weights[a] * weights[b] over the paths u <- a <- b -> v of four different nodes, for each of P
// pairs of V nodes: sums [P, lanes], 0 before, of so many threads. For a C compiler the first of them
// does the work of its pair and of those behind it that have the same u.
KERNEL paths(const i64 *pairs, i64 P, i64 lanes, i64 V, const i64 *indptr, const ID *sources,
             const float *weights, float *sums) {
  THREAD(P * lanes);
  const i64 *pair = pairs + 2 * (i / lanes), u = pair[0];
#ifdef HOST
  if (V <= MOST) {
    if (i % lanes || (i && pair[-2] == u)) return;
    if (size < V) {
      free(steps);
      steps = (double *)calloc(V, sizeof *steps);
      if (!steps || pthread_setspecific(ends, steps)) FAIL;
      size = V;
    }
    walk(indptr, sources, u, weights, 0);
    for (; pair < pairs + 2 * P && pair[0] == u; pair += 2) {
      const i64 v = pair[1], start = indptr[v];
      const double back = u != v && is_edge(indptr, sources, v, u) ? weights[v] : 0;  // of v as a
      double sum = 0;
      for (i64 place = start; place < indptr[v + 1]; place++) {
        const i64 b = sources[place];
        if (b == u || b == v || (place > start && sources[place - 1] == b)) continue;
        sum += weights[b] * (steps[b] - back);
      }
      sums[(pair - pairs) / 2 * lanes] = (float)sum;
    }
    walk(indptr, sources, u, weights, 1);
    return;
  }
#endif
  const i64 v = pair[1];
  float sum = 0;
  for (i64 place = indptr[u] + i % lanes; place < indptr[u + 1]; place += lanes) {
    const i64 a = sources[place];
    if (a == u || a == v || !weights[a] || (place > indptr[u] && sources[place - 1] == a)) continue;
    const int less = indptr[a + 1] - indptr[a] < indptr[v + 1] - indptr[v];
    sum += weights[a] * shared(indptr, sources, less ? a : v, less ? v : a, u, v, weights);
  }
  sums[i] = sum;
}
