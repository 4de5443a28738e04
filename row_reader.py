"""Rows of a table in a file, read at the disk's own rate: many requests in flight.

    reader = open_rows("features.npy", offset=4096, row_bytes=1024, rows=V)
    reader.read(ids, out)              # out[i] = row ids[i], in any order, repeats allowed

A memory map asks for one page a thread at a time and waits. Here the rows asked for are sorted, those that lie close
together are joined into one request of at most REQUEST bytes, and DEPTH requests are under way at a time: by io_uring,
which takes least of the processor, or by as many threads with `pread`, which a busy machine gives more of its time.
Where the kernel has and allows both, each is tried now and then, and the one that read faster goes on.

Read through the page cache, rows that come again need no disk while their pages stay. With O_DIRECT they leave it to
others, such as a graph that is sampled from; where the file system refuses that, they are read through it. Direct
requests begin and end on blocks of the disk, so of a table that starts on a block and has rows of whole blocks (a
store's features do where a row is a multiple of 512 bytes) nothing is read but rows and the gaps between them.

C, called without Python's lock; io_uring by its system calls alone, without liburing. Rows are copied out of buffers
that the kernel knows (registered, so that it need not pin memory for each request): for a row of a few KiB that costs
less than pinning the place it goes to. Threads that read through the page cache read a single row to its place. Reads
that were interrupted or came back short go on where they stopped; an error or the end of the file is one StoreError,
after which the reader works on.

To copy this file take native.py and disk.py along. Linux; elsewhere, and without a C compiler, `open_rows` gives None.
"""

import ctypes
import functools
import os
import sys
import threading
import time

import native
import torch
from disk import StoreError

DEPTH = 64  # requests in flight
LARGE = 1000  # rows of a read by which the engines are compared
TRY = 50  # reads after which each engine is tried anew

SOURCE = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

typedef int64_t i64;
#define REQUEST (1 << 16)  // bytes of a request, unless a row is larger
#define GAP 4096           // bytes between two rows that cost less to read than another request
#define ENDED 100000       // in the place of an errno: the file ends before the row does
#define COOPERATIVE (1U << 8)  // IORING_SETUP_COOP_TASKRUN: no interrupt of this thread for a completion

typedef struct { i64 row, place; } wanted_t;

typedef struct {           // a piece of the file, from block to block
  i64 offset, length;
  i64 needed;              // bytes up to the end of its last row
  i64 first, count;        // its rows in the sorted list
} request_t;

typedef struct {           // a request under way
  request_t *request;
  i64 got;
  char *buffer;
  char *target;            // where in the output a thread reads its only row to; null: rows are copied from the buffer
} slot_t;

typedef struct {
  int fd, ring;            // ring -1: threads
  int registered;          // the kernel knows the buffers
  i64 base, row_bytes, block, room;  // block: requests begin and end on a multiple; room: bytes of a buffer
  i64 depth;
  char *buffers;
  slot_t *slots;
  void *queues;            // of the ring: mapped memory, and what lies in it
  i64 queues_bytes, entries_bytes;
  struct io_uring_sqe *entries;
  struct io_uring_cqe *results;
  unsigned *submit_tail, *submit_mask, *submit_order, *result_head, *result_tail, *result_mask;
} reader_t;

typedef struct {           // one call
  reader_t *reader;
  wanted_t *wanted;
  request_t *requests;
  i64 num_requests;
  char *out;
  atomic_llong next;       // the first request that nobody has taken
  atomic_int failed;       // 0, an errno or ENDED
  atomic_llong failed_at;  // byte of the file
} call_t;

// ---- sorting rows and joining neighbours

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

static i64 join(const reader_t *reader, const wanted_t *wanted, i64 n, request_t *requests) {  // -> how many
  request_t *last = requests - 1;
  for (i64 i = 0; i < n; i++) {
    i64 start = reader->base + wanted[i].row * reader->row_bytes, end = start + reader->row_bytes;
    i64 from = start / reader->block * reader->block;
    i64 to = (end + reader->block - 1) / reader->block * reader->block;
    if (last >= requests && from <= last->offset + last->length + GAP && to - last->offset <= reader->room) {
      if (to > last->offset + last->length) last->length = to - last->offset;
      last->needed = end - last->offset;
      last->count++;
    } else {
      *++last = (request_t){from, to - from, end - from, i, 1};
    }
  }
  return last - requests + 1;
}

// ---- what becomes of a read; both engines ask here

static void fail(call_t *call, int reason, i64 at) {
  int none = 0;
  if (atomic_compare_exchange_strong(&call->failed, &none, reason)) atomic_store(&call->failed_at, at);
}

// A read returned so many bytes, or -errno -> 1: read on from slot->got, 0: the request is done, or has failed.
static int read_on(call_t *call, slot_t *slot, i64 result) {
  reader_t *reader = call->reader;
  request_t *request = slot->request;
  i64 before = slot->got;
  if (result == -EINTR || result == -EAGAIN) return 1;
  if (result < 0) {
    fail(call, (int)-result, request->offset + before);
    return 0;
  }
  slot->got += result;
  if (slot->got < request->needed) {
    slot->got -= slot->got % reader->block;  // direct reads begin on a block
    if (slot->got > before) return 1;
    fail(call, ENDED, request->offset + before + result);
    return 0;
  }
  if (slot->target) return 0;
  for (i64 i = request->first; i < request->first + request->count; i++) {
    i64 at = reader->base + call->wanted[i].row * reader->row_bytes - request->offset;
    memcpy(call->out + call->wanted[i].place * reader->row_bytes, slot->buffer + at, reader->row_bytes);
  }
  return 0;
}

static request_t *take_request(call_t *call) {
  i64 next = atomic_load(&call->failed) ? call->num_requests : atomic_fetch_add(&call->next, 1);
  return next < call->num_requests ? &call->requests[next] : 0;
}

// ---- threads

typedef struct { call_t *call; slot_t *slot; } work_t;

static void *work(void *argument) {
  call_t *call = ((work_t *)argument)->call;
  slot_t *slot = ((work_t *)argument)->slot;
  while ((slot->request = take_request(call))) {
    request_t *request = slot->request;
    int alone = request->count == 1 && call->reader->block == 1;  // direct reads would need it to lie on a block
    slot->target = alone ? call->out + call->wanted[request->first].place * request->length : 0;
    slot->got = 0;
    i64 result;
    do {
      char *to = (slot->target ? slot->target : slot->buffer) + slot->got;
      result = pread(call->reader->fd, to, request->length - slot->got, request->offset + slot->got);
      if (result < 0) result = -errno;
    } while (read_on(call, slot, result));
  }
  return 0;
}

static void read_by_threads(call_t *call) {
  reader_t *reader = call->reader;
  i64 wanted = call->num_requests < reader->depth ? call->num_requests : reader->depth, started = 0;
  pthread_t threads[wanted];
  work_t works[wanted];
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 1 << 17);
  for (i64 i = 0; i < wanted; i++) works[i] = (work_t){call, &reader->slots[i]};
  while (started < wanted - 1 && !pthread_create(&threads[started], &small, work, &works[started])) started++;
  pthread_attr_destroy(&small);
  work(&works[wanted - 1]);  // this thread; where others could not be started, fewer do as well
  while (started) pthread_join(threads[--started], 0);
}

// ---- io_uring

static int set_up_ring(reader_t *reader) {  // 0, or why not
  struct io_uring_params p = {.flags = COOPERATIVE};
  int ring = (int)syscall(SYS_io_uring_setup, reader->depth, &p);
  if (ring < 0 && errno == EINVAL) {
    p = (struct io_uring_params){0};
    ring = (int)syscall(SYS_io_uring_setup, reader->depth, &p);
  }
  if (ring < 0) return errno;
  i64 submit = p.sq_off.array + p.sq_entries * sizeof(unsigned);
  i64 results = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
  reader->queues_bytes = submit > results ? submit : results;
  reader->entries_bytes = p.sq_entries * sizeof(struct io_uring_sqe);
  char *queues = MAP_FAILED, *entries = MAP_FAILED;
  if (p.features & IORING_FEAT_SINGLE_MMAP) {
    int flags = MAP_SHARED | MAP_POPULATE, access = PROT_READ | PROT_WRITE;
    queues = mmap(0, reader->queues_bytes, access, flags, ring, IORING_OFF_SQ_RING);
    entries = mmap(0, reader->entries_bytes, access, flags, ring, IORING_OFF_SQES);
  }
  if (queues == MAP_FAILED || entries == MAP_FAILED) {
    if (queues != MAP_FAILED) munmap(queues, reader->queues_bytes);
    close(ring);
    return ENOSYS;
  }
  reader->ring = ring;
  reader->queues = queues;
  reader->entries = (struct io_uring_sqe *)entries;
  reader->results = (struct io_uring_cqe *)(queues + p.cq_off.cqes);
  reader->submit_tail = (unsigned *)(queues + p.sq_off.tail);
  reader->submit_mask = (unsigned *)(queues + p.sq_off.ring_mask);
  reader->submit_order = (unsigned *)(queues + p.sq_off.array);
  reader->result_head = (unsigned *)(queues + p.cq_off.head);
  reader->result_tail = (unsigned *)(queues + p.cq_off.tail);
  reader->result_mask = (unsigned *)(queues + p.cq_off.ring_mask);
  struct iovec buffers = {reader->buffers, reader->depth * reader->room};  // refused where little memory may be locked
  reader->registered = !syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffers, 1);
  return 0;
}

static void submit(reader_t *reader, i64 number, unsigned *tail) {
  slot_t *slot = &reader->slots[number];
  unsigned at = *tail & *reader->submit_mask;
  struct io_uring_sqe *entry = &reader->entries[at];
  memset(entry, 0, sizeof *entry);
  entry->opcode = reader->registered ? IORING_OP_READ_FIXED : IORING_OP_READ;
  entry->fd = reader->fd;
  entry->off = slot->request->offset + slot->got;
  entry->addr = (uintptr_t)(slot->buffer + slot->got);
  entry->len = (unsigned)(slot->request->length - slot->got);
  entry->user_data = number;
  reader->submit_order[at] = at;
  ++*tail;
}

// -> 0, or an errno with which the ring itself failed: the kernel may still write to its buffers, so it is left aside.
static int read_by_ring(call_t *call) {
  reader_t *reader = call->reader;
  i64 idle[reader->depth], num_idle = 0, under_way = 0;
  unsigned tail = *reader->submit_tail, waiting = 0;  // waiting: entries that the kernel has not taken
  for (i64 i = 0; i < reader->depth; i++) idle[num_idle++] = i;
  for (;;) {
    request_t *request;
    while (num_idle && (request = take_request(call))) {
      i64 number = idle[--num_idle];
      reader->slots[number] = (slot_t){request, 0, reader->slots[number].buffer, 0};
      submit(reader, number, &tail);
      waiting++;
      under_way++;
    }
    if (!under_way) return 0;
    __atomic_store_n(reader->submit_tail, tail, __ATOMIC_RELEASE);
    long taken = syscall(SYS_io_uring_enter, reader->ring, waiting, 1, IORING_ENTER_GETEVENTS, 0, 0);
    if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) return errno;
    if (taken > 0) waiting -= (unsigned)taken;
    unsigned head = *reader->result_head, end = __atomic_load_n(reader->result_tail, __ATOMIC_ACQUIRE);
    for (; head != end; head++) {
      struct io_uring_cqe *result = &reader->results[head & *reader->result_mask];
      i64 number = (i64)result->user_data;
      if (read_on(call, &reader->slots[number], result->res)) {
        submit(reader, number, &tail);
        waiting++;
      } else {
        idle[num_idle++] = number;
        under_way--;
      }
    }
    __atomic_store_n(reader->result_head, head, __ATOMIC_RELEASE);
  }
}

// ---- what Python calls

void rr_close(reader_t *reader) {
  if (reader->ring >= 0) {
    munmap(reader->queues, reader->queues_bytes);
    munmap(reader->entries, reader->entries_bytes);
    close(reader->ring);
  }
  free(reader->slots);
  free(reader->buffers);
  free(reader);
}

reader_t *rr_open(int fd, i64 base, i64 row_bytes, i64 block, i64 depth, int use_ring) {  // null: no memory
  reader_t *reader = calloc(1, sizeof *reader);
  if (!reader) return 0;
  i64 least = (row_bytes + 2 * block + 4095) / 4096 * 4096;
  *reader = (reader_t){.fd = fd, .ring = -1, .base = base, .row_bytes = row_bytes, .block = block, .depth = depth};
  reader->room = least > REQUEST ? least : REQUEST;
  reader->slots = calloc(depth, sizeof(slot_t));
  if (posix_memalign((void **)&reader->buffers, 4096, depth * reader->room)) reader->buffers = 0;
  if (!reader->slots || !reader->buffers) {
    rr_close(reader);
    return 0;
  }
  for (i64 i = 0; i < depth; i++) reader->slots[i].buffer = reader->buffers + i * reader->room;
  if (use_ring) set_up_ring(reader);
  return reader;
}

int rr_has_ring(reader_t *reader) { return reader->ring >= 0; }

// Whether requests that begin and end on multiples of `block` can be read at all.
int rr_accepts(int fd, i64 block) {
  void *buffer;
  if (posix_memalign(&buffer, 4096, block)) return 0;
  i64 result;
  do result = pread(fd, buffer, block, 0); while (result < 0 && errno == EINTR);
  int refused = result < 0 && errno == EINVAL;
  free(buffer);
  return !refused;
}

// Read n rows, row ids[i] to place places[i] of out (null: i) -> bytes asked of the file, or -errno, -ENDED; then *at
// is where in the file, -1: the reader is not to be used again.
i64 rr_read(reader_t *reader, const i64 *ids, const i64 *places, i64 n, char *out, int by_threads, i64 *at) {
  wanted_t *wanted = malloc((2 * n + 1) * sizeof *wanted);
  request_t *requests = malloc((n + 1) * sizeof *requests);
  i64 bytes = -ENOMEM, largest = 0;
  *at = 0;
  if (wanted && requests) {
    for (i64 i = 0; i < n; i++) {
      wanted[i] = (wanted_t){ids[i], places ? places[i] : i};
      largest = ids[i] > largest ? ids[i] : largest;
    }
    sort_wanted(wanted, wanted + n, n, largest);
    call_t call = {.reader = reader, .wanted = wanted, .requests = requests, .out = out};
    call.num_requests = join(reader, wanted, n, requests);
    if (call.num_requests) {
      int broken = 0;
      if (by_threads || reader->ring < 0) read_by_threads(&call);
      else broken = read_by_ring(&call);
      if (broken) {
        call.failed = broken;
        call.failed_at = -1;
      }
    }
    bytes = 0;
    for (i64 i = 0; i < call.num_requests; i++) bytes += requests[i].length;
    if (call.failed) {
      bytes = -call.failed;
      *at = call.failed_at;
    }
  }
  free(requests);
  free(wanted);
  return bytes;
}
"""

ENDED = 100000  # as in C
_ANY, _I64 = ctypes.c_void_p, ctypes.c_int64
SIGNATURES = {
    "rr_open": (_ANY, ctypes.c_int, _I64, _I64, _I64, _I64, ctypes.c_int),
    "rr_close": (None, _ANY),
    "rr_has_ring": (ctypes.c_int, _ANY),
    "rr_accepts": (ctypes.c_int, ctypes.c_int, _I64),
    "rr_read": (_I64, _ANY, _ANY, _ANY, _I64, _ANY, ctypes.c_int, ctypes.POINTER(_I64)),
}


@functools.cache
def _library():
    if sys.platform != "linux":
        return None
    return native.load_c("row_reader", SOURCE, ["-O2", "-fPIC", "-shared", "-pthread"], SIGNATURES)


def open_rows(path, offset, row_bytes, rows, **options):
    """A `RowReader` of a table of `rows` rows that begins at byte `offset` of a file; None where there is no C code."""
    return RowReader(path, offset, row_bytes, rows, **options) if _library() else None


class RowReader:
    """Reads rows of a table in a file; any number of threads may read at once, and a process that was forked.

    Args:
        path: the file. offset: where row 0 begins. row_bytes, rows: size of a row, and how many there are.
        depth: requests in flight of each call.
        direct: False reads through the page cache.
        engine: "io_uring", where the kernel allows it, or "threads"; None: whichever turns out to be faster.

    Attributes:
        engine: the one in use at last. direct: whether the page cache is left alone. block: requests are multiples of
        so many bytes. bytes_read: asked of the file so far.

    Raises:
        StoreError: for a file that cannot be opened.
    """

    def __init__(self, path, offset, row_bytes, rows, *, depth=DEPTH, direct=True, engine=None):
        self.path, self.offset, self.row_bytes, self.rows = str(path), offset, row_bytes, rows
        self.depth = max(1, min(depth, (1 << 26) // max(row_bytes, 1)))
        self.bytes_read, self.lock, self.engines = 0, threading.Lock(), [engine] if engine else ["io_uring", "threads"]
        self.rates, self.calls = dict.fromkeys(self.engines, 0.0), 0  # rows a second
        self.pid = None
        self.block, self.direct = self._open(direct)
        if not _library().rr_has_ring(self._idle_reader(keep=True)):
            self.engines = ["threads"]
        self.engine = self.engines[0]

    def _open(self, direct):
        """Open the file -> (block, whether directly)."""
        self.pid, self.idle = os.getpid(), []  # what a forked process inherits is the parent's
        try:
            for block in (512, 4096) if direct else ():
                try:
                    self.file = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
                except OSError:
                    break  # a file system without it
                if _library().rr_accepts(self.file, block):
                    return block, True
                os.close(self.file)
            self.file = os.open(self.path, os.O_RDONLY)
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_RANDOM)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error.strerror}") from error
        return 1, False

    def _idle_reader(self, keep=False):
        """A reader that no other thread is using: a ring and its buffers."""
        if self.pid != os.getpid():
            self.block, self.direct = self._open(self.direct)
        try:
            reader = self.idle.pop()  # atomic, as append is
        except IndexError:
            ring = "io_uring" in self.engines
            reader = _library().rr_open(self.file, self.offset, self.row_bytes, self.block, self.depth, ring)
            if not reader:
                raise StoreError(f"no memory to read {self.path} with {self.depth} requests in flight") from None
        if keep:
            self.idle.append(reader)
        return reader

    def _engine(self, n):
        """The engine for the next n rows: for a few, the first; else the faster one, and each anew after TRY reads."""
        if len(self.engines) == 1 or n < LARGE:
            return self.engines[0]
        turn = self.calls % TRY
        self.calls += 1
        return self.engines[turn] if turn < len(self.engines) else max(self.engines, key=self.rates.get)

    def read(self, ids, out, places=None):
        """Read rows.

        Args:
            ids: int32 or int64 [n] numbers of rows, in any order, repeats allowed.
            out: contiguous CPU tensor whose rows have row_bytes bytes.
            places: int64 [n], where in `out` each row goes; row i of ids to row i of out when None.

        Returns:
            `out`.

        Raises:
            IndexError: for a number that is no row.
            StoreError: where the disk fails or the file ends too soon; what was read by then is in `out`.
        """
        if not ids.numel():
            return out
        low, high = (int(n) for n in ids.aminmax())
        if low < 0 or high >= self.rows:
            raise IndexError(f"node {low if low < 0 else high} is out of range: ids lie in [0, {self.rows})")
        ids = ids.to(torch.int64).contiguous()
        if not out.is_contiguous() or out.nbytes != len(out) * self.row_bytes:
            raise ValueError(f"out is {list(out.shape)} {out.dtype}: rows of {self.row_bytes} bytes, without gaps, "
                             "are needed")  # fmt: skip
        if places is None and len(out) < len(ids):
            raise ValueError(f"out has {len(out)} rows, {len(ids)} are needed")
        reader, at = self._idle_reader(), ctypes.c_int64()
        where = None if places is None else places.data_ptr()
        engine, start = self._engine(len(ids)), time.perf_counter()
        threads = engine == "threads"
        code = _library().rr_read(reader, ids.data_ptr(), where, len(ids), out.data_ptr(), threads, ctypes.byref(at))
        if at.value < 0:
            raise StoreError(f"io_uring failed while {self.path} was read: {os.strerror(-code)}")
        self.idle.append(reader)
        if code == -ENDED:
            raise StoreError(f"{self.path} ends at byte {at.value:,} in the middle of its rows: it was cut short after "
                             "it was opened; rebuild the store")  # fmt: skip
        if code < 0:
            raise StoreError(f"{self.path} cannot be read at byte {at.value:,}: {os.strerror(-code)}")
        with self.lock:
            self.bytes_read += code
            if len(ids) >= LARGE:
                self.engine, rate = engine, len(ids) / (time.perf_counter() - start)
                self.rates[engine] = (self.rates[engine] + rate) / 2 if self.rates.get(engine) else rate
        return out

    def close(self):
        """Close the file and free the buffers; nobody may be reading."""
        if self.pid == os.getpid():
            while self.idle:
                _library().rr_close(self.idle.pop())
            os.close(self.file)
        self.pid = None

    def __del__(self):
        if getattr(self, "pid", None) and sys is not None and not sys.is_finalizing():
            self.close()
