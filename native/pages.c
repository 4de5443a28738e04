// Belady's MIN over a sliding window: which pages of a file the page cache keeps, given the next batches. Called by
// extras/lookahead.py. It keeps the pages whose next use is nearest, and no cache can read less (IBM Systems Journal 5(2),
// 1966); pages that no batch of the window uses are evicted first.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>

typedef int64_t i64;

typedef struct { int32_t *pages, *next; i64 n; } batch_t;  // next[i]: the batch that uses pages[i] next, 0: unknown

typedef struct { int32_t before, after, bucket; } link_t;  // of a doubly linked list; bucket -1: the page is not kept

typedef struct {
  i64 num_pages, capacity, kept;
  i64 planned, newest;  // batches are numbered from 1; 1 .. planned are planned, those up to newest are expected
  i64 ring, farthest;   // number of buckets by batch; no kept page is used next in a batch beyond `farthest`
  i64 *last;            // [num_pages] 1 + (batch << 32 | its index there) of the last use expected so far, or 0
  link_t *links;        // [num_pages] list b % ring: kept pages next used by batch b; list `ring`: no use is known
  int32_t *heads;       // [ring + 1]
  batch_t *window;      // [ring]
} planner_t;

static void unlink_page(planner_t *p, int32_t page) {
  link_t link = p->links[page];
  if (link.before >= 0) p->links[link.before].after = link.after;
  else p->heads[link.bucket] = link.after;
  if (link.after >= 0) p->links[link.after].before = link.before;
  p->links[page].bucket = -1;
}

static void link_page(planner_t *p, int32_t page, i64 next) {  // next: the batch that uses it next; 0: none is known
  int32_t bucket = (int32_t)(next ? next & (p->ring - 1) : p->ring);
  p->farthest = next > p->farthest ? next : p->farthest;
  p->links[page] = (link_t){-1, p->heads[bucket], bucket};
  if (p->heads[bucket] >= 0) p->links[p->heads[bucket]].before = page;
  p->heads[bucket] = page;
}

void pages_close(planner_t *p) {
  for (i64 b = 0; p->window && b < p->ring; b++) free(p->window[b].pages);
  free(p->last), free(p->links), free(p->heads), free(p->window), free(p);
}

// Make a planner; the first `capacity` pages are assumed to be in the page cache. -> null: no memory
void *pages_open(i64 num_pages, i64 capacity, i64 lookahead) {
  planner_t *p = calloc(1, sizeof *p);
  if (!p) return 0;
  p->num_pages = num_pages, p->capacity = p->kept = capacity, p->ring = 4;
  while (p->ring < lookahead + 2) p->ring *= 2;
  p->last = calloc(num_pages, sizeof(i64));
  p->links = malloc(num_pages * sizeof(link_t));
  p->heads = malloc((p->ring + 1) * sizeof(int32_t));
  p->window = calloc(p->ring, sizeof(batch_t));
  if (!p->last || !p->links || !p->heads || !p->window) {
    pages_close(p);
    return 0;
  }
  for (i64 b = 0; b <= p->ring; b++) p->heads[b] = -1;
  for (i64 i = 0; i < num_pages; i++) p->links[i].bucket = -1;
  for (i64 i = 0; i < capacity; i++) link_page(p, (int32_t)i, 0);
  return p;
}

// Expect one more batch, which uses rows ids[n] of a table that begins at byte `offset`. -> nonzero: no memory
int pages_expect(planner_t *p, const i64 *ids, i64 n, i64 offset, i64 row_bytes, i64 page_bytes) {
  i64 now = p->newest + 1, most = n * ((row_bytes + 2 * page_bytes - 2) / page_bytes) + 1;
  batch_t *batch = &p->window[now & (p->ring - 1)];
  *batch = (batch_t){calloc(most, 2 * sizeof(int32_t)), 0, 0};
  if (!batch->pages) return 1;
  batch->next = batch->pages + most;
  p->newest = now;
  for (i64 i = 0; i < n; i++) {
    i64 start = offset + ids[i] * row_bytes;
    for (i64 page = start / page_bytes; page <= (start + row_bytes - 1) / page_bytes; page++) {
      i64 last = p->last[page] - 1, of = last >> 32;
      if (last >= 0 && of == now) continue;  // it is in the batch already
      p->last[page] = 1 + (now << 32 | batch->n);
      if (last >= 0 && of > p->planned) {
        p->window[of & (p->ring - 1)].next[last & 0xffffffff] = (int32_t)now;
      } else if (p->links[page].bucket >= 0) {
        unlink_page(p, (int32_t)page);
        link_page(p, (int32_t)page, now);
      }
      batch->pages[batch->n++] = (int32_t)page;
    }
  }
  return 0;
}

// The number of pages of the oldest expected batch, which bounds both lists of its plan.
i64 pages_room(planner_t *p) { return p->window[(p->planned + 1) & (p->ring - 1)].n; }

// Plan the oldest expected batch: which pages it reads, and which are evicted once it has read them (perhaps some of
// the same pages). counts: the lengths of the two lists
void pages_plan(planner_t *p, i64 *missing, i64 *dropped, i64 *counts) {
  i64 now = ++p->planned;
  batch_t *batch = &p->window[now & (p->ring - 1)];
  counts[0] = counts[1] = 0;
  for (i64 i = 0; i < batch->n; i++) {
    if (p->links[batch->pages[i]].bucket >= 0) unlink_page(p, batch->pages[i]);
    else missing[counts[0]++] = batch->pages[i], p->kept++;
    link_page(p, batch->pages[i], batch->next[i]);
  }
  for (; p->kept > p->capacity; p->kept--) {
    while (p->farthest > now && p->heads[p->farthest & (p->ring - 1)] < 0) p->farthest--;
    int32_t page = p->heads[p->ring] >= 0 ? p->heads[p->ring] : p->heads[p->farthest & (p->ring - 1)];
    unlink_page(p, page);
    dropped[counts[1]++] = page;
  }
  free(batch->pages);
  batch->pages = 0;
}

// Forget all expected batches that are not planned.
void pages_forget(planner_t *p) {
  for (i64 b = p->planned + 1; b <= p->newest; b++) {
    batch_t *batch = &p->window[b & (p->ring - 1)];
    for (int32_t page; (page = p->heads[b & (p->ring - 1)]) >= 0;) unlink_page(p, page), link_page(p, page, 0);
    for (i64 i = 0; i < batch->n; i++) p->last[batch->pages[i]] = 0;
    free(batch->pages);
    batch->pages = 0;
  }
  p->newest = p->farthest = p->planned;
}

// Advise the kernel to read pages of a file, in ascending order, into the page cache (wanted) or to drop them.
void pages_advise(int fd, const i64 *pages, i64 n, i64 page_bytes, int wanted) {
  for (i64 i = 0, count; i < n; i += count) {
    for (count = 1; i + count < n && pages[i + count] == pages[i] + count;) count++;
    int advice = wanted ? POSIX_FADV_WILLNEED : POSIX_FADV_DONTNEED;
    posix_fadvise(fd, pages[i] * page_bytes, count * page_bytes, advice);
  }
}
