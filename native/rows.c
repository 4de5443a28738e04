// Reads rows of a table in a file: many threads wait for the disk, each with its own request. Called by
// disk/reader.py. The requested rows are sorted, and those close together become one request.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int64_t i64;
#define REQUEST (1 << 16)  // bytes of a request, unless a row is larger
#define GAP 4096           // fewer bytes between two rows cost less to read than another request, and are no whole page
#define ENDED 100000       // used like an errno: the file ends before the row does

typedef struct { i64 row, place; } wanted_t;

typedef struct {           // a piece of the file, from one block boundary to another
  i64 offset, length;
  i64 needed;              // bytes up to the end of its last row
  i64 first, count;        // its rows in the sorted list
} request_t;

typedef struct {
  int fd;
  i64 base, row_bytes, block, room;  // row 0 begins at base; requests are multiples of block; bytes of a buffer
  wanted_t *wanted;
  request_t *requests;
  i64 num_requests;
  char *out;
  atomic_llong next;       // the first request that no thread has taken
  atomic_int failed;       // 0, an errno or ENDED
  atomic_llong failed_at;  // byte of the file
} call_t;

static void sort_wanted(wanted_t *wanted, wanted_t *spare, i64 n, i64 largest) {  // radix sort by row, 11 bits a time
  wanted_t *from = wanted, *to = spare;
  for (int shift = 0; shift < 63 && largest >> shift; shift += 11) {
    i64 start[2049] = {0};
    for (i64 i = 0; i < n; i++) start[(from[i].row >> shift & 2047) + 1]++;
    for (int digit = 0; digit < 2047; digit++) start[digit + 1] += start[digit];
    for (i64 i = 0; i < n; i++) to[start[from[i].row >> shift & 2047]++] = from[i];
    wanted_t *swap = from;
    from = to;
    to = swap;
  }
  if (from != wanted) memcpy(wanted, from, n * sizeof *wanted);
}

static i64 join(const call_t *call, i64 n, request_t *requests) {  // merge sorted rows into requests -> how many
  request_t *last = requests - 1;
  for (i64 i = 0; i < n; i++) {
    i64 start = call->base + call->wanted[i].row * call->row_bytes, end = start + call->row_bytes;
    i64 from = start / call->block * call->block;
    i64 to = (end + call->block - 1) / call->block * call->block;
    if (last >= requests && from < last->offset + last->length + GAP && to - last->offset <= call->room) {
      if (to > last->offset + last->length) last->length = to - last->offset;
      last->needed = end - last->offset;
      last->count++;
    } else {
      *++last = (request_t){from, to - from, end - from, i, 1};
    }
  }
  return last - requests + 1;
}

static void fail(call_t *call, int reason, i64 at) {
  int none = 0;
  if (atomic_compare_exchange_strong(&call->failed, &none, reason)) atomic_store(&call->failed_at, at);
}

// Read a request up to its last row, going on after interrupted and short reads -> whether it succeeded.
static int read_all(call_t *call, const request_t *request, char *to) {
  for (i64 got = 0; got < request->needed;) {
    i64 result = pread(call->fd, to + got, request->length - got, request->offset + got);
    if (result < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    i64 before = got;
    got += result > 0 ? result : 0;
    if (got >= request->needed) break;
    got -= got % call->block;  // a direct read has to begin at a block
    if (got > before) continue;
    fail(call, result < 0 ? errno : ENDED, request->offset + before);
    return 0;
  }
  return 1;
}

static void *work(void *argument) {
  call_t *call = argument;
  char *buffer;
  if (posix_memalign((void **)&buffer, 4096, call->room)) {
    fail(call, ENOMEM, 0);
    return 0;
  }
  for (i64 i; !call->failed && (i = atomic_fetch_add(&call->next, 1)) < call->num_requests;) {
    const request_t *request = &call->requests[i];
    const wanted_t *wanted = call->wanted + request->first;
    // a single row is read right into its place, except by direct reads, which need an aligned buffer
    char *place = request->count == 1 && call->block == 1 ? call->out + wanted->place * call->row_bytes : 0;
    if (!read_all(call, request, place ? place : buffer) || place) continue;
    for (i64 k = 0; k < request->count; k++) {
      const char *row = buffer + call->base + wanted[k].row * call->row_bytes - request->offset;
      memcpy(call->out + wanted[k].place * call->row_bytes, row, call->row_bytes);
    }
  }
  free(buffer);
  return 0;
}

// Read n rows, row ids[i] to place places[i] of out (null: i), with up to `depth` requests in flight -> bytes requested
// from the file; or -errno or -ENDED, and *at is the byte of the file where that happened.
i64 rows_read(int fd, i64 base, i64 row_bytes, i64 block, i64 depth, const i64 *ids, const i64 *places, i64 n, char *out,
              i64 *at) {
  wanted_t *wanted = malloc((2 * n + 1) * sizeof *wanted);
  request_t *requests = malloc((n + 1) * sizeof *requests);
  i64 bytes = -ENOMEM, largest = 0, started = 0, least = (row_bytes + 2 * block + 4095) / 4096 * 4096;
  *at = 0;
  if (wanted && requests) {
    for (i64 i = 0; i < n; i++) {
      wanted[i] = (wanted_t){ids[i], places ? places[i] : i};
      largest = ids[i] > largest ? ids[i] : largest;
    }
    sort_wanted(wanted, wanted + n, n, largest);
    call_t call = {.fd = fd, .base = base, .row_bytes = row_bytes, .block = block, .wanted = wanted,
                   .requests = requests, .out = out, .room = least > REQUEST ? least : REQUEST};
    call.num_requests = join(&call, n, requests);
    depth = call.num_requests < depth ? call.num_requests : depth;
    pthread_t threads[depth + 1];
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 1 << 17);
    while (started < depth - 1 && !pthread_create(&threads[started], &small, work, &call)) started++;
    pthread_attr_destroy(&small);
    if (depth) work(&call);  // on this thread, too; if others could not be started, fewer do the work
    while (started) pthread_join(threads[--started], 0);
    bytes = 0;
    for (i64 i = 0; i < call.num_requests; i++) bytes += requests[i].length;
    if (call.failed) bytes = -call.failed, *at = call.failed_at;
  }
  free(requests);
  free(wanted);
  return bytes;
}
