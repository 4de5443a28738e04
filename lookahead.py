"""A cache of feature rows in host memory that knows what the next batches will ask for.

    cache = LookaheadCache(store.features, budget=1 << 30, lookahead=1000, hot=expected_visits(...))
    with cache.looking_ahead(sampled_batches) as batches:      # the same batches in the same order, `lookahead` later
        for batch in batches:
            x = cache.gather(batch.blocks[0].src_nodes)

What our sampler draws is a function of the seed and the step, so the next thousand batches can be drawn before they
are fetched. The cache then keeps the rows whose next use is nearest (belady.py). Ginex (PVLDB 15(11)) does it for graph
training in super-batches of two passes over the disk; here a window slides and each row is read when it is used.

Where rows are read through the kernel's page cache, the same window says which of its pages to keep (`KeptPages`). The
kernel would give up what was not used for longest, which says nothing about when a batch draws it next.

The values of rows do not depend on any of this. Letters: V nodes, n rows of a batch. This file needs belady.py,
native.py, disk.py, features.py and row_reader.py.
"""

import itertools
import mmap
import os
import threading
from collections import deque, namedtuple
from contextlib import closing, contextmanager

import torch
from belady import Planner, library
from disk import StoreError, gather_target
from features import prefetch

RAMP = 2  # batches sampled for each one fetched until the window is full, so that training need not wait for that
WINDOW = 10  # a window asks for so many times the rows of the cache, unless --lookahead says otherwise
TOUCHES = 2  # and for each page of a table so often, where pages are kept: MIN gains little from what comes later
ROOM = 15 / 16  # of the memory that is free, for pages: the rest is left to others
AHEAD = 1 << 21  # bytes of a file that the kernel is asked to read ahead at a time


class KeptPages:
    """The pages of a table that the kernel's page cache keeps: at first as much of the file as there is room for, which
    `_read_in_order` reads while training starts, then the pages that are used soonest.

    Args:
        reader: RowReader of the table, through the page cache. places: pages to keep.
        lookahead: batches of the window.
    """

    def __init__(self, reader, places, lookahead):
        self.reader = reader
        self.planner = Planner(_pages_of(reader), places, lookahead)
        for first in range(0, places, 1 << 16):  # what is read in order, as if batches had asked for it
            self.planner.expect(torch.arange(first, min(first + (1 << 16), places)))
            self.planner.plan()

    def expect(self, ids):
        """A later batch asks for these rows."""
        ids = ids.to(torch.int64).contiguous()
        rows = ids.data_ptr(), len(ids), self.reader.offset, self.reader.row_bytes, mmap.PAGESIZE
        pages = torch.empty(library().la_pages(*rows, None), dtype=torch.int64)
        library().la_pages(*rows, pages.data_ptr())
        self.planner.expect(pages)

    def plan(self):
        """Decide on the oldest batch that was expected -> (missing, given_up), pages to read for it, and to drop when
        its rows were gathered; int64, ascending."""
        pages, source, _ = self.planner.plan()
        return pages[source < 0].unique(), self.planner.given_up()

    def read(self, pages):
        """Have the kernel begin to read pages; nobody waits for them but where a disk's queue is full."""
        library().la_advise(self.reader.file, pages.data_ptr(), len(pages), mmap.PAGESIZE, True)

    def drop(self, pages):
        """Take pages out of the page cache."""
        library().la_advise(self.reader.file, pages.data_ptr(), len(pages), mmap.PAGESIZE, False)

    def forget(self):
        """No batch is expected any more."""
        self.planner.forget()


def _pages_of(reader):
    """How many pages of a file there are up to the end of its table."""
    return -(-(reader.offset + reader.rows * reader.row_bytes) // mmap.PAGESIZE)


def _read_in_order(reader, first, end, ended):
    """Have the kernel read the pages first .. end of a file, until `ended` is set; one by one, so that each can be
    dropped. A disk gives a file in order many times as fast as its pages at random."""
    for at in range(first * mmap.PAGESIZE, end * mmap.PAGESIZE, AHEAD):
        if ended.is_set():
            break
        os.posix_fadvise(reader.file, at, min(AHEAD, end * mmap.PAGESIZE - at), os.POSIX_FADV_WILLNEED)


_Plan = namedtuple("_Plan", "ids source keep missing given_up min_hits")  # missing, given_up: pages
_NONE = torch.empty(0, dtype=torch.int64)


class LookaheadCache:
    """Features on disk behind `budget` bytes of host memory, in which the rows used soonest are kept.

    Beside the rows it takes 13 bytes a node, and the blocks of the window. Rows that are read through the page cache
    have a second level there, `KeptPages`, which takes another 28 bytes for each 4 KiB.

    Args:
        features: `MmapFeatures` of a store.
        budget: bytes of rows to keep.
        lookahead: batches of the window; None: as many as ask for WINDOW times the rows of the cache, or TOUCHES times
            for each page, as long as their blocks take no more than a quarter of the budget and of that level a 32nd.
        hot: [V] the larger the hotter, for rows that the window does not ask for: `expected_visits`.
        batches: how many will be asked for; None: many. Few do not pay for reading pages that they may not need.
        share: (rank, world) among the processes of this machine that read the table. Where there are several, each
            reads its part of it in order, and what stays is left to the kernel: none knows the batches of the others.

    Attributes:
        shape, dtype: of the features. cache: [capacity, F].
        room: bytes of the page cache in which pages are kept; 0: the kernel decides, or rows are read past it.
        lookups, hits: rows asked for through `looking_ahead`, and those of them that were in the cache.
    """

    def __init__(self, features, budget, lookahead=None, hot=None, batches=None, share=(0, 1)):
        self.shape, self.dtype = tuple(features.shape), features.dtype
        self.reader = features.reader()
        if library() is None or self.reader is None:
            raise StoreError("a cache that looks ahead needs Linux and a C compiler")
        num_rows, width = self.shape
        self.cache = torch.empty(min(num_rows, int(budget) // (width * self.dtype.itemsize)), width, dtype=self.dtype)
        self.budget, self.lookahead, self.level = budget, lookahead, None
        self.room = 0
        if features.stays() and not self.reader.direct:
            self.room = min(max(0, int(ROOM * features.room())), num_rows * self.reader.row_bytes)
        self.batches, self.share = batches, share
        if hot is not None:  # chances of at most 1, two levels a factor of two, 63 for a row in every batch
            self.level = hot.clamp(2.0**-31, 1).log2().mul_(2).add_(63).clamp_(0, 63).to(torch.uint8)
        self.planner = self.pages = None  # made when the first batch tells how large a window is
        self.ended = threading.Event()
        self.plans, self.given_up = deque(), deque()  # not carried out; pages to drop
        self.lookups = self.hits = self.min_hits = 0

    @property
    def hit_rate(self):
        """Share of the rows asked for that were in the cache."""
        return self.hits / max(1, self.lookups)

    def counts(self):
        """Counts since the start: rows asked for and hit; bytes read from the disk, and that MIN would have to read."""
        row_bytes = self.shape[1] * self.dtype.itemsize
        least = (self.lookups - self.min_hits) * row_bytes
        return {"rows": self.lookups, "hits": self.hits, "bytes_read": self.reader.bytes_read, "bytes_min": least}

    @contextmanager
    def looking_ahead(self, batches):
        """Pass batches on in their order, each when those of the window behind it are known; a context, whose end
        forgets what was expected and not fetched.

        The batches are taken, and decided on, on a thread of its own; on another the reading of their pages begins. All
        their `blocks[0].src_nodes` are to be gathered, in order.
        """
        planned = self._planned(batches)
        # a generator on a thread of its own: what prefetch is given to call is next()
        ahead = prefetch(lambda _, slot: next(planned, None), itertools.count(), depth=2)
        begun = prefetch(lambda plan, slot: self._begin(plan), itertools.takewhile(bool, ahead), depth=2)
        try:
            with closing(planned), closing(ahead), closing(begun):
                yield begun
        finally:
            for plan in self.plans:
                self.planner.release(plan.keep)
            self.given_up.extend(plan.given_up for plan in self.plans if self.pages)
            self.plans.clear()
            for level in filter(None, (self.planner, self.pages)):
                level.forget()

    def _planned(self, batches):
        """The batches, each once the window behind it is full."""
        window, passed_on = deque(), 0
        for batch in batches:
            if self.planner is None:
                self._start(batch)
            window.append(batch)
            for level in filter(None, (self.planner, self.pages)):
                level.expect(batch.blocks[0].src_nodes)
            while len(window) > min(self.lookahead, RAMP * (passed_on + 1)):
                passed_on += 1
                yield self._decided(window.popleft())
        while window:
            yield self._decided(window.popleft())

    def _decided(self, batch):
        """The oldest batch of the window -> (batch, what is read for it and what is kept)."""
        _, source, keep = self.planner.plan()
        pages = self.pages.plan() if self.pages else (_NONE, _NONE)
        self.plans.append(_Plan(batch.blocks[0].src_nodes, source, keep, *pages, self.planner.min_hits))
        return batch, self.plans[-1]

    def _begin(self, decided):
        """Have the pages read that a batch lacks -> the batch."""
        batch, plan = decided
        if self.pages:
            self.pages.read(plan.missing)
            while self.given_up:
                self.pages.drop(self.given_up.popleft())
        return batch

    def _start(self, batch):
        """Begin, with a first batch that tells how large the others are."""
        rows, row_bytes = max(1, batch.blocks[0].num_src), self.shape[1] * self.dtype.itemsize
        table, touched = self.shape[0] * row_bytes, rows * max(row_bytes, mmap.PAGESIZE)  # bytes; of pages, by a batch
        rank, world = self.share
        if self.batches is not None and self.batches * world * touched < table:
            self.room = 0
        plans_pages = self.room and world == 1
        if self.lookahead is None:
            size = sum(tensor.nbytes for block in batch.blocks for tensor in block if tensor is not None)
            wanted, size, budget = WINDOW * len(self.cache) / rows, size + 20 * rows, self.budget / 4
            if plans_pages:
                wanted, size, budget = max(wanted, TOUCHES * table / touched), size + 20 * rows, budget + self.room / 32
            self.lookahead = int(min(wanted, budget / size)) + 1
        self.planner = Planner(self.shape[0], len(self.cache), self.lookahead, self.level)
        if not self.room:
            return
        places = min(_pages_of(self.reader), -(-self.room // mmap.PAGESIZE))
        if plans_pages:
            self.pages = KeptPages(self.reader, places, self.lookahead)
        part = self.reader, places * rank // world, places * (rank + 1) // world, self.ended
        threading.Thread(target=_read_in_order, args=part, name="in order", daemon=True).start()

    def __del__(self):
        if hasattr(self, "ended"):
            self.ended.set()

    def gather(self, ids, out=None):
        """Copy rows: those of the next batch of `looking_ahead` through the cache, others from the disk.

        Args:
            ids: int32 or int64 [n] node ids, repeats allowed.
            out: [n, F]; a tensor is made when None.

        Raises:
            IndexError: for an id that is no row.
            StoreError: where the disk fails; the rows that the cache holds stay right.
        """
        out = gather_target(self, ids, out)
        if not self.plans or self.plans[0][0] is not ids:  # a planned batch is known by its very tensor of ids
            return self.reader.read(ids, out)
        _, source, keep, _, given_up, min_hits = self.plans[0]
        row_bytes, copy = self.shape[1] * self.dtype.itemsize, library().la_copy
        copy(out.data_ptr(), self.cache.data_ptr(), source.data_ptr(), len(ids), row_bytes, True)
        missing = (source < 0).nonzero().squeeze(1)
        self.reader.read(ids[missing], out, missing)
        copy(self.cache.data_ptr(), out.data_ptr(), keep.data_ptr(), len(ids), row_bytes, False)
        if self.pages:
            self.given_up.append(given_up)
        self.plans.popleft()  # not before: what failed is not in the cache
        self.lookups, self.hits, self.min_hits = self.lookups + len(ids), self.hits + len(ids) - len(missing), min_hits
        return out
