"""Belady's MIN over a sliding window: which rows a cache keeps when the next batches are known.

    planner = Planner(num_rows=V, places=1000, lookahead=50)
    planner.expect(ids)                        # of a batch to come, up to `lookahead` of them before the first plan
    ids, source, keep = planner.plan()         # of the oldest: where each row lies, and where what is read goes

Kept are the rows whose next use is nearest, which is what reads least of all that any cache could do (IBM Systems
Journal 5(2), 1966). A row that no batch of the window asks for counts as used later than all others, the less hot, the
later; so a window of 0 keeps the hottest rows. A batch may leave rows out of the cache altogether.

How much MIN itself must read, had it known all batches to the end, is counted along: a row is read again unless it
could have been kept since it was last used, that is, unless at some moment in between the cache was full of rows used
again sooner. Taking these intervals by their end and keeping each that fits is optimal (interval scheduling on as
many machines as there are places; OPTgen of Hawkeye, ISCA 2016, counts so).

A row is whatever has a number: lookahead.py plans pages of a file as well. Letters: V rows, n of them in a batch; the
cache has `capacity` places. To copy this file take native.py and disk.py along.
"""

import ctypes
import functools
from collections import deque

import native
import torch
from disk import StoreError

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;
#define LEVELS 64          // of how hot a row is that the window does not ask for
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

typedef struct {           // a batch that is expected and not planned
  const i64 *ids;          // [n]
  i64 n;
  i64 *previous;           // [n] the use before this one: 0, or 1 + (batch << 32 | its index in that batch)
  int32_t *next;           // [n] the batch of the next use; 0: none is known
} batch_t;

typedef struct { i64 node; int32_t before, after, bucket; } place_t;  // of the cache; places of a bucket are linked

typedef struct {
  i64 V, capacity;
  i64 planned, newest;     // batches are numbered from 1; 1 .. planned are planned, those up to newest are expected
  i64 *last;               // [V] a node's last use so far, as batch_t.previous has them
  int32_t *place;          // [V] 1 + where its row lies in the cache; 0: nowhere
  const unsigned char *level;  // [V] how hot; null: all the same
  place_t *places;         // [capacity]
  // buckets: of the rows that batch b asks for next, b modulo `ring`; then one a level; then of free places
  int32_t *heads;
  i64 ring, farthest, coldest;  // no occupied bucket of a batch is beyond, none of a level is below
  batch_t *window;         // [ring]
  // counting what MIN would hit; [batches so far]
  i64 room, full, min_hits;
  int32_t *kept, *starts, *peak;  // rows that MIN keeps after a batch; full: the last with capacity of them
  // rows that the last plan took out of the cache, or read and did not keep
  i64 *given_up, num_given_up, room_given_up;
} cache_t;

// ---- buckets

static void unlink_place(cache_t *cache, int32_t place) {
  place_t *p = &cache->places[place];
  if (p->before >= 0) cache->places[p->before].after = p->after;
  else cache->heads[p->bucket] = p->after;
  if (p->after >= 0) cache->places[p->after].before = p->before;
}

static void link_place(cache_t *cache, int32_t place, i64 bucket) {
  place_t *p = &cache->places[place];
  *p = (place_t){p->node, -1, cache->heads[bucket], (int32_t)bucket};
  if (p->after >= 0) cache->places[p->after].before = place;
  cache->heads[bucket] = place;
}

// The bucket of a row whose next use is batch `next`, 0: unknown.
static i64 bucket_of(cache_t *cache, i64 node, i64 next) {
  if (next) {
    cache->farthest = MAX(cache->farthest, next);
    return next & (cache->ring - 1);
  }
  i64 level = cache->level ? cache->level[node] : 0;
  cache->coldest = MIN(cache->coldest, level);
  return cache->ring + level;
}

// A place for a row of `node` whose next use is `next`, taken from a row that is used later; -1: all are used sooner.
static int32_t make_place(cache_t *cache, i64 node, i64 next) {
  i64 free_places = cache->ring + LEVELS, victims;
  if (cache->heads[free_places] >= 0) {
    victims = free_places;
  } else {
    while (cache->coldest < LEVELS && cache->heads[cache->ring + cache->coldest] < 0) cache->coldest++;
    i64 level = cache->level ? cache->level[node] : 0;
    if (cache->coldest < LEVELS) {
      if (!next && level <= cache->coldest) return -1;
      victims = cache->ring + cache->coldest;
    } else {
      i64 last = cache->ring - 1;
      while (cache->farthest > cache->planned && cache->heads[cache->farthest & last] < 0) cache->farthest--;
      if (!next || cache->farthest <= next) return -1;
      victims = cache->farthest & (cache->ring - 1);
    }
  }
  int32_t place = cache->heads[victims];
  if (place < 0) return -1;
  unlink_place(cache, place);
  if (victims != free_places) {
    cache->place[cache->places[place].node] = 0;
    cache->given_up[cache->num_given_up++] = cache->places[place].node;
  }
  return place;
}

// ---- what MIN would hit

static int count_for_min(cache_t *cache, const batch_t *batch, i64 now) {  // nonzero: no memory
  if (now >= cache->room) {
    i64 room = 2 * now + 1024;
    int32_t **arrays[] = {&cache->kept, &cache->starts, &cache->peak};
    for (int i = 0; i < 3; i++) {
      int32_t *grown = realloc(*arrays[i], room * sizeof(int32_t));
      if (!grown) return 1;
      *arrays[i] = grown;
      memset(grown + cache->room, 0, (room - cache->room) * sizeof(int32_t));
    }
    cache->room = room;
  }
  i64 earliest = now;
  for (i64 i = 0; i < batch->n; i++) {
    i64 since = batch->previous[i] ? (batch->previous[i] - 1) >> 32 : 0;
    if (since == now) cache->min_hits++;  // a row of this batch, once more
    if (since == now || since <= cache->full) continue;  // never used, or at some moment since then the cache was full
    cache->starts[since]++;
    earliest = MIN(earliest, since);
  }
  int32_t peak = 0;
  for (i64 b = now - 1; b >= earliest; b--) cache->peak[b] = peak = MAX(peak, cache->kept[b]);
  i64 admitted = 0;  // all intervals end now, so of those that begin later fewer rows were kept at any moment
  for (i64 b = earliest; b < now; b++) {
    admitted += MAX(0, MIN(cache->starts[b], cache->capacity - cache->peak[b] - admitted));
    cache->starts[b] = 0;
    cache->kept[b] += (int32_t)admitted;
    if (cache->kept[b] >= cache->capacity) cache->full = b;
  }
  cache->min_hits += admitted;
  return 0;
}

// ---- what Python calls

void la_close(cache_t *cache) {
  for (i64 b = 0; cache->window && b < cache->ring; b++) free(cache->window[b].previous);
  free(cache->last), free(cache->place), free(cache->places), free(cache->heads), free(cache->window);
  free(cache->kept), free(cache->starts), free(cache->peak), free(cache->given_up), free(cache);
}

cache_t *la_open(i64 V, i64 capacity, i64 lookahead, const unsigned char *level) {  // null: no memory
  cache_t *cache = calloc(1, sizeof *cache);
  if (!cache) return 0;
  cache->V = V, cache->capacity = capacity, cache->level = level, cache->ring = 4;
  while (cache->ring < lookahead + 2) cache->ring *= 2;
  i64 buckets = cache->ring + LEVELS + 1;
  cache->last = calloc(V + 1, sizeof(i64));
  cache->place = calloc(V + 1, sizeof(int32_t));
  cache->places = calloc(capacity + 1, sizeof(place_t));
  cache->heads = malloc(buckets * sizeof(int32_t));
  cache->window = calloc(cache->ring, sizeof(batch_t));
  if (!cache->last || !cache->place || !cache->places || !cache->heads || !cache->window) {
    la_close(cache);
    return 0;
  }
  for (i64 b = 0; b < buckets; b++) cache->heads[b] = -1;
  for (i64 i = capacity - 1; i >= 0; i--) link_place(cache, (int32_t)i, cache->ring + LEVELS);
  cache->coldest = LEVELS;
  return cache;
}

// The next batch after those expected so far asks for these n rows; ids stays where it is until it is planned or
// forgotten. A row that comes twice is known by its last index in the batch. -> nonzero: no memory.
int la_expect(cache_t *cache, const i64 *ids, i64 n) {
  i64 now = cache->newest + 1;
  batch_t *batch = &cache->window[now & (cache->ring - 1)];
  *batch = (batch_t){ids, n, calloc(n + 1, sizeof(i64) + sizeof(int32_t)), 0};
  if (!batch->previous) return 1;
  batch->next = (int32_t *)(batch->previous + n + 1);
  cache->newest = now;
  for (i64 i = 0; i < n; i++) {
    __builtin_prefetch(&cache->last[ids[MIN(i + 32, n - 1)]], 1);
    __builtin_prefetch(&cache->place[ids[MIN(i + 32, n - 1)]]);
    i64 node = ids[i], last = cache->last[node];
    batch->previous[i] = last;
    cache->last[node] = 1 + (now << 32 | i);
    if (last && (last - 1) >> 32 == now) continue;
    if (last && (last - 1) >> 32 > cache->planned) {
      cache->window[(last - 1) >> 32 & (cache->ring - 1)].next[(last - 1) & 0xffffffff] = (int32_t)now;
    } else if (cache->place[node]) {
      unlink_place(cache, cache->place[node] - 1);
      link_place(cache, cache->place[node] - 1, bucket_of(cache, node, now));
    }
  }
  return 0;
}

// The pages that rows of a table lie in, which begins at byte `offset` -> how many; pages: null, or room for them.
i64 la_pages(const i64 *ids, i64 n, i64 offset, i64 row_bytes, i64 page, i64 *pages) {
  i64 count = 0;
  for (i64 i = 0; i < n; i++) {
    i64 start = offset + ids[i] * row_bytes;
    for (i64 p = start / page; p <= (start + row_bytes - 1) / page; p++, count++)
      if (pages) pages[count] = p;
  }
  return count;
}

// Decide on the oldest batch that is not planned: row i lies in place from[i] of the cache, -1: it is to be read, and
// then to be kept in place keep[i], -1: in none. -> how many are to be read, or -1: no memory.
i64 la_plan(cache_t *cache, int32_t *from, int32_t *keep) {
  i64 now = cache->planned + 1, reads = 0;
  batch_t *batch = &cache->window[now & (cache->ring - 1)];
  if (cache->room_given_up < 2 * batch->n) {
    i64 *grown = realloc(cache->given_up, 2 * batch->n * sizeof(i64));
    if (!grown) return -1;
    cache->given_up = grown, cache->room_given_up = 2 * batch->n;
  }
  if (count_for_min(cache, batch, now)) return -1;
  cache->planned = now, cache->num_given_up = 0;
  for (i64 i = 0; i < batch->n; i++) {
    __builtin_prefetch(&cache->place[batch->ids[MIN(i + 32, batch->n - 1)]], 1);
    from[i] = cache->place[batch->ids[i]] - 1;
    if (from[i] < 0) continue;
    unlink_place(cache, from[i]);
    link_place(cache, from[i], bucket_of(cache, batch->ids[i], batch->next[i]));
  }
  for (i64 i = 0; i < batch->n; i++) {
    if (from[i] >= 0) continue;
    reads++;
    i64 node = batch->ids[i];
    int32_t place = cache->place[node] - 1;
    if (place >= 0) unlink_place(cache, place);  // it comes twice
    else place = make_place(cache, node, batch->next[i]);
    if (place < 0) continue;
    cache->places[place].node = node;
    cache->place[node] = place + 1;
    link_place(cache, place, bucket_of(cache, node, batch->next[i]));
  }
  // a row may have lost its place again to one of the same batch
  for (i64 i = 0; i < batch->n; i++) {
    keep[i] = from[i] < 0 ? cache->place[batch->ids[i]] - 1 : -1;
    if (from[i] < 0 && keep[i] < 0) cache->given_up[cache->num_given_up++] = batch->ids[i];
  }
  i64 n = 0;  // nor is a row given up that came back within the batch
  for (i64 i = 0; i < cache->num_given_up; i++)
    if (!cache->place[cache->given_up[i]]) cache->given_up[n++] = cache->given_up[i];
  cache->num_given_up = n;
  free(batch->previous);
  batch->previous = 0;
  return reads;
}

// Undo every la_expect that was not planned.
void la_forget(cache_t *cache) {
  for (i64 b = cache->newest; b > cache->planned; b--) {
    batch_t *batch = &cache->window[b & (cache->ring - 1)];
    for (i64 i = batch->n - 1; i >= 0; i--) cache->last[batch->ids[i]] = batch->previous[i];
    for (int32_t place; (place = cache->heads[b & (cache->ring - 1)]) >= 0;) {
      unlink_place(cache, place);
      link_place(cache, place, bucket_of(cache, cache->places[place].node, 0));
    }
    free(batch->previous);
    batch->previous = 0;
  }
  cache->newest = cache->farthest = cache->planned;
}

// The places of a plan that was not carried out hold nothing.
void la_release(cache_t *cache, const int32_t *keep, i64 n) {
  i64 free_places = cache->ring + LEVELS;
  for (i64 i = 0; i < n; i++) {
    if (keep[i] < 0 || cache->places[keep[i]].bucket == free_places) continue;
    cache->place[cache->places[keep[i]].node] = 0;
    unlink_place(cache, keep[i]);
    link_place(cache, keep[i], free_places);
  }
}

// The rows that the last plan took out of the cache, or read and did not keep, some perhaps twice -> how many.
i64 la_given_up(cache_t *cache, i64 *rows) {
  if (rows) memcpy(rows, cache->given_up, cache->num_given_up * sizeof(i64));
  return cache->num_given_up;
}

i64 la_min_hits(cache_t *cache) { return cache->min_hits; }

// Copy rows: to[i] = from[at[i]] (gather), or to[at[i]] = from[i], for every i with at[i] >= 0.
void la_copy(char *to, const char *from, const int32_t *at, i64 n, i64 row_bytes, int gather) {
  for (i64 i = 0; i < n; i++) {
    if (at[i] < 0) continue;
    if (gather) memcpy(to + i * row_bytes, from + at[i] * row_bytes, row_bytes);
    else memcpy(to + at[i] * row_bytes, from + i * row_bytes, row_bytes);
  }
}

// Pages of a file, in ascending order, are to be read into the page cache (wanted) or to leave it.
void la_advise(int fd, const i64 *pages, i64 n, i64 page, int wanted) {
  for (i64 i = 0, count; i < n; i += count) {
    for (count = 1; i + count < n && pages[i + count] == pages[i] + count;) count++;
    posix_fadvise(fd, pages[i] * page, count * page, wanted ? POSIX_FADV_WILLNEED : POSIX_FADV_DONTNEED);
  }
}
"""

_ANY, _I64 = ctypes.c_void_p, ctypes.c_int64
SIGNATURES = {
    "la_open": (_ANY, _I64, _I64, _I64, _ANY),
    "la_close": (None, _ANY),
    "la_expect": (ctypes.c_int, _ANY, _ANY, _I64),
    "la_pages": (_I64, _ANY, _I64, _I64, _I64, _I64, _ANY),
    "la_plan": (_I64, _ANY, _ANY, _ANY),
    "la_forget": (None, _ANY),
    "la_release": (None, _ANY, _ANY, _I64),
    "la_given_up": (_I64, _ANY, _ANY),
    "la_min_hits": (_I64, _ANY),
    "la_copy": (None, _ANY, _ANY, _ANY, _I64, _I64, ctypes.c_int),
    "la_advise": (None, ctypes.c_int, _ANY, _I64, _I64, ctypes.c_int),
}


@functools.cache
def library():
    """The C code, or None, after a warning, where it cannot be compiled."""
    return native.load_c("belady", SOURCE, ["-O2", "-fPIC", "-shared"], SIGNATURES)


class Planner:
    """Decides which rows of a table a cache keeps: batches are expected first, then planned in the same order."""

    def __init__(self, num_rows, places, lookahead, level=None):
        self.level = level  # uint8 [V], below 64; C holds a pointer to it
        pointer = None if level is None else level.data_ptr()
        self.state = library().la_open(num_rows, places, lookahead, pointer)
        if not self.state:
            raise StoreError(f"no memory for a cache of {places:,} of {num_rows:,} rows")
        self.expected = deque()  # ids int64 [n] of the batches that are not planned

    def expect(self, ids):
        """A later batch asks for these rows, some of them perhaps twice (as a node at two times)."""
        ids = ids.to(torch.int64).contiguous()
        if library().la_expect(self.state, ids.data_ptr(), len(ids)):
            raise StoreError("no memory to look further ahead: give a smaller --lookahead")
        self.expected.append(ids)

    def plan(self):
        """Decide on the oldest batch that was expected -> (ids, from, keep): row i lies in place from[i] of the cache,
        or is read where that is -1; what was read goes to place keep[i], unless that is -1. int32 [n] both."""
        ids = self.expected.popleft()
        source, keep = torch.empty(2, len(ids), dtype=torch.int32)
        if library().la_plan(self.state, source.data_ptr(), keep.data_ptr()) < 0:
            raise StoreError("no memory to plan what a cache keeps")
        return ids, source, keep

    def given_up(self):
        """The rows that the last plan took out of the cache, or had read and does not keep -> int64 [m], ascending."""
        rows = torch.empty(library().la_given_up(self.state, None), dtype=torch.int64)
        library().la_given_up(self.state, rows.data_ptr())
        return rows.unique()

    def forget(self):
        """No batch is expected any more."""
        library().la_forget(self.state)
        self.expected.clear()

    def release(self, keep):
        """A plan was not carried out: its places hold nothing."""
        library().la_release(self.state, keep.data_ptr(), len(keep))

    @property
    def min_hits(self):
        """How many of the rows asked for so far MIN would have had in its cache."""
        return library().la_min_hits(self.state)

    def __del__(self):
        if getattr(self, "state", None) and library:
            library().la_close(self.state)
