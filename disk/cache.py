"""Look-ahead cache for feature rows in a file: hottest rows in memory, page cache planned for the next batches.

    cache = LookaheadCache(store.features, budget=1 << 30, hot=expected_visits(...))
    with cache.looking_ahead(sampled_batches) as batches:      # the same batches in the same order, `lookahead` later
        for batch in batches:
            x = cache.gather(batch.blocks[0].src_nodes)

Samples depend only on the seed and the step, so the next batches can be sampled before they are fetched. If the kernel's
page cache has room for a large share of the file, this window of batches decides which pages are kept (native/pages.c);
the kernel itself would evict the least recently used, which says nothing about the next use. Missing pages are read
before their batch's turn. Ginex (PVLDB 15(11)) plans its row cache in the same way; with planned pages that was no
faster than the hottest rows, chosen once. To copy this file, also take native/, features.py, disk/files.py and
disk/reader.py.
"""

import itertools
import mmap
import os
import threading
import types
from collections import deque
from contextlib import closing, contextmanager

import torch

from disk.files import StoreError, gather_target
from disk.reader import library
from features import CachedFeatures, prefetch

# batches sampled for each one fetched until the window is full, so that training need not wait for that
RAMP = 2
# a window uses each page of the table so often: MIN gains little from what comes later
TOUCHES = 2
ROOM = 15 / 16  # of the memory that is free, for pages: the rest is left to others
AHEAD = 1 << 21  # bytes of a file that the kernel is asked to read ahead at a time


class KeptPages:
    """The pages of a table, of a RowReader, that the page cache keeps: at first as much of the file as there is room for
    (`places` pages), then those that are used soonest in a window of `lookahead` batches."""

    def __init__(self, reader, places, lookahead):
        self.reader = reader
        self.code = library("pages")
        end = reader.offset + reader.rows * reader.row_bytes
        self.state = self.code.pages_open(-(-end // mmap.PAGESIZE), places, lookahead)
        if not self.state:
            raise StoreError(f"no memory to plan {places:,} pages of {reader.path}")

    def expect(self, ids):
        """A later batch asks for rows ids [n]."""
        ids = ids.to(torch.int64).contiguous()
        table = self.reader.offset, self.reader.row_bytes, mmap.PAGESIZE
        if self.code.pages_expect(self.state, ids, len(ids), *table):
            raise StoreError("no memory to look further ahead: give a smaller --lookahead")

    def plan(self):
        """Decide on the oldest batch expected -> (pages to read for it, pages to drop once it is gathered), ascending."""
        if self.code.pages_plan(self.state):
            raise StoreError("no memory to plan what the page cache keeps")
        planned, lists = self.code.pages_planned, []
        for missing in (True, False):
            lists.append(torch.empty(planned(self.state, missing, None), dtype=torch.int64))
            planned(self.state, missing, lists[-1])
        return tuple(pages.sort().values for pages in lists)

    def advise(self, pages, wanted):
        """Have the kernel begin to read pages (wanted) or drop them; asynchronous unless the device queue is full."""
        self.code.pages_advise(self.reader.file, pages, len(pages), mmap.PAGESIZE, wanted)

    def forget(self):
        """No batch is expected any more."""
        self.code.pages_forget(self.state)

    def __del__(self):
        if getattr(self, "state", None):
            self.code.pages_close(self.state)


def read_in_order(reader, first, end, ended):
    """Have the kernel read pages first .. end of a file until `ended` is set: a disk gives a file in order many times as
    fast as its pages at random."""
    end *= mmap.PAGESIZE
    for at in range(first * mmap.PAGESIZE, end, AHEAD):
        if ended.is_set():
            break
        os.posix_fadvise(reader.file, at, min(AHEAD, end - at), os.POSIX_FADV_WILLNEED)


class LookaheadCache(CachedFeatures):
    """Features on disk behind `budget` bytes of host memory, in which the hottest rows are kept, and behind the page
    cache, in which the pages used soonest are kept.

    Beside the rows it takes 4 bytes a node, and with pages 20 bytes for each 4 KiB, and the blocks of the window.

    Args:
        features: `MmapFeatures` of a store. budget: bytes of rows to keep.
        lookahead: batches of the window; None: as many as use each page TOUCHES times, as long as their blocks take no
            more than a quarter of the budget and a 32nd of the page cache; 0 where no pages are planned.
        hot: [V] the larger the hotter: `expected_visits`.
        batches: expected number of batches (None: unknown); short runs plan no pages.
        share: (rank, world) among the processes of this machine that read the table. Of several each reads its part of
            it in order, and the kernel decides what stays: none knows the batches of the others.

    Attributes (others: `CachedFeatures`):
        room: bytes of the page cache in which pages are kept; 0: the kernel decides, or rows are read past it.
    """

    def __init__(self, features, budget, lookahead=None, hot=None, batches=None, share=(0, 1)):
        shape, dtype, reader = tuple(features.shape), features.dtype, features.reader()
        if library("pages") is None or reader is None:
            raise StoreError("a cache that looks ahead needs Linux and a C compiler")
        self.reader, self.budget, self.lookahead, self.room = reader, budget, lookahead, 0
        if features.stays() and not reader.direct:
            self.room = min(max(0, int(ROOM * features.room())), shape[0] * reader.row_bytes)

        def gather(ids, out):
            return reader.read(ids, torch.empty(len(ids), shape[1], dtype=dtype))

        table = types.SimpleNamespace(shape=shape, dtype=dtype, gather=gather)
        super().__init__(table, torch.zeros(shape[0]) if hot is None else hot, budget)
        # the page cache need not keep what lies here now
        os.posix_fadvise(reader.file, 0, 0, os.POSIX_FADV_DONTNEED)
        self.batches, self.share = batches, share
        self.pages = None  # made when the first batch tells how large a window is
        self.started, self.ended = False, threading.Event()
        self.given_up = deque()  # (number of a batch, pages to drop once it was gathered)
        self.planned = self.gathered = 0  # batches

    def counts(self):
        """Counts since the start: rows asked for and hit; bytes read from the disk or the page cache."""
        return {"rows": self.lookups, "hits": self.hits, "bytes_read": self.reader.bytes_read}

    @contextmanager
    def looking_ahead(self, batches):
        """Pass batches on in their order, each when those of the window behind it are known; a context, whose end
        forgets what was expected. One thread takes and plans them, another begins to read their pages."""
        planned = self._planned(batches)
        # what prefetch is given to call is next()
        ahead = prefetch(lambda _, slot: next(planned, None), itertools.count(), depth=2)
        plans = itertools.takewhile(bool, ahead)
        begun = prefetch(lambda plan, slot: self._begin(*plan), plans, depth=2)
        try:
            with closing(planned), closing(ahead), closing(begun):
                yield begun
        finally:
            self.gathered = self.planned
            if self.pages:
                self.pages.forget()

    def _planned(self, batches):
        """(batch, pages to read for it), each once the window behind the batch is full."""
        window, passed_on = deque(), 0
        for batch in batches:
            if not self.started:
                self._start(batch)
            window.append(batch)
            if self.pages:
                nodes = batch.blocks[0].src_nodes
                self.pages.expect(nodes[nodes < self.shape[0]])
            while len(window) > min(self.lookahead, RAMP * (passed_on + 1)):
                passed_on += 1
                yield window.popleft(), self._plan()
        while window:
            yield window.popleft(), self._plan()

    def _plan(self):
        """The pages to read for the oldest batch of the window."""
        if not self.pages:
            return None
        missing, given_up = self.pages.plan()
        self.planned += 1
        self.given_up.append((self.planned, given_up))
        return missing

    def _begin(self, batch, missing):
        """Begin to read the pages that a batch lacks, and drop those given up by batches that were gathered -> batch."""
        if self.pages:
            self.pages.advise(missing, True)
            while self.given_up and self.given_up[0][0] <= self.gathered:
                self.pages.advise(self.given_up.popleft()[1], False)
        return batch

    def _start(self, batch):
        """Begin, with a first batch that tells how large the others are."""
        self.started = True
        rows, row_bytes = max(1, batch.blocks[0].num_src), self.reader.row_bytes
        # bytes; of pages, by a batch
        table, touched = self.shape[0] * row_bytes, rows * max(row_bytes, mmap.PAGESIZE)
        rank, world = self.share
        if self.batches is not None and self.batches * world * touched < table:
            self.room = 0
        plans = self.room and world == 1
        if self.lookahead is None:
            tensors = [tensor for block in batch.blocks for tensor in block if tensor is not None]
            size = sum(tensor.nbytes for tensor in tensors) + 20 * rows
            most = (self.budget / 4 + self.room / 32) / size
            self.lookahead = int(min(TOUCHES * table / touched, most)) + 1 if plans else 0
        if not self.room:
            return
        places = -(-self.room // mmap.PAGESIZE)  # of a part of the table
        if plans:
            self.pages = KeptPages(self.reader, places, self.lookahead)
        part = self.reader, places * rank // world, places * (rank + 1) // world, self.ended
        threading.Thread(target=read_in_order, args=part, name="in order", daemon=True).start()

    def __del__(self):
        if hasattr(self, "ended"):
            self.ended.set()

    def gather(self, ids, out=None):
        """Copy rows ids [n] -> [n, F], `out` if that is given; StoreError where the disk fails."""
        out, position = gather_target(self, ids, out), self.position[ids]
        hits, misses = (found.nonzero().squeeze(1) for found in (position >= 0, position < 0))
        out.index_copy_(0, hits, self.cache.index_select(0, position[hits]))
        self.reader.read(ids[misses], out, misses)
        with self.lock:
            self.hits, self.lookups = self.hits + len(hits), self.lookups + len(ids)
            self.gathered += 1
        return out
