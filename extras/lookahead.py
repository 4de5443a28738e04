"""Look-ahead cache for feature rows in a file: hottest rows in memory, page cache planned for the next batches.

    cache = LookaheadCache(store.features, budget=1 << 30, hot=expected_visits(...))
    with cache.looking_ahead(sampled_batches) as batches:      # the same batches in the same order, `lookahead` later
        for batch in batches:
            x = cache.gather(batch.blocks[0].src_nodes)

Samples depend only on the seed and the step, so the next batches can be sampled before they are fetched. If the kernel's
page cache has room for a large share of the file, this window of batches decides which pages are kept (native/pages.c);
the kernel itself would evict the least recently used, which says nothing about the next use. Missing pages are read
before their batch's turn. Ginex (PVLDB 15(11)) plans its row cache in the same way; with planned pages that was no
faster than the hottest rows, chosen once. To copy this file, also take native/, features.py, extras/cache.py, disk/convert.py,
disk/files.py and disk/reader.py.
"""

import functools
import itertools
import math
import mmap
import os
import threading
import time
import types
from collections import deque
from contextlib import closing, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from disk.convert import check_ids, gather_target
from disk.files import StoreError, readable_size
from disk.reader import library
from extras import extra
from extras.cache import CachedFeatures
from features import prefetch

# batches sampled per batch fetched while the window fills, so that training need not wait until it is full
RAMP = 2
# average uses of each page of the table in a default window: MIN gains nothing from a longer one
TOUCHES = 3
SHARES = 1 / 8, 1 / 2, 3 / 4  # of the free memory that rows may take; pages get the rest
ROOM = 15 / 16  # share of the free memory for pages; the rest is left to other processes
AHEAD = 1 << 21  # bytes of one read-ahead request to the kernel


class KeptPages:
    """Plans which pages of a RowReader's file the page cache keeps: at first the first `places` pages, then those whose
    next use in a window of `lookahead` batches is nearest. used: pages of the batch planned last."""

    def __init__(self, reader, places, lookahead):
        self.reader = reader
        self.code = library("pages")
        end = reader.offset + reader.rows * reader.row_bytes
        pages = -(-end // mmap.PAGESIZE)
        self.state = self.code.pages_open(pages, min(places, pages), lookahead)
        if not self.state:
            raise StoreError(f"no memory to plan {places:,} pages of {reader.path}")

    def expect(self, ids):
        """Append to the window a batch that reads rows `ids`, integers [n]."""
        check_ids(ids, self.reader.rows)
        ids = ids.to(torch.int64).contiguous()
        offset = self.reader.offset
        row_bytes = self.reader.row_bytes
        if self.code.pages_expect(self.state, ids, len(ids), offset, row_bytes, mmap.PAGESIZE):
            raise StoreError("no memory to look further ahead: give a smaller --lookahead")

    def plan(self):
        """Plan the oldest batch of the window -> (pages to read for it, pages to drop once it is gathered), sorted."""
        self.used = self.code.pages_room(self.state)
        lists = torch.empty(2, self.used, dtype=torch.int64, device="cpu")
        counts = lists.new_empty(2)
        self.code.pages_plan(self.state, *lists, counts)
        return tuple(pages[:n].sort().values for pages, n in zip(lists, counts.tolist()))

    def advise(self, pages, wanted):
        """Tell the kernel to read pages ahead (wanted) or drop them; asynchronous unless the device queue is full."""
        self.code.pages_advise(self.reader.file, pages, len(pages), mmap.PAGESIZE, wanted)

    def forget(self):
        """Empty the window."""
        self.code.pages_forget(self.state)

    def __del__(self):
        if getattr(self, "state", None):
            self.code.pages_close(self.state)


class Together:
    """The processes of a machine that plan the pages of one file: the first plans for all, the others send it the rows that
    their batches read. Each makes the same calls in the same order. group: a process group of theirs alone, with gloo."""

    def __init__(self, group):
        self.group = group
        self.world = dist.get_world_size(group)
        self.plans = dist.get_rank(group) == 0
        self.first = dist.get_global_rank(group, 0)

    def agreed(self, *numbers, op=dist.ReduceOp.MIN):
        """Return the least of all processes for each of these integers, or what `op` makes of them."""
        agreed = torch.tensor(numbers, device="cpu")
        dist.all_reduce(agreed, op, self.group)
        return agreed.tolist()

    def keep(self, rows):
        """Copy rows of features into memory that the processes share -> tensor; StoreError if there is none."""
        total = functools.partial(self.agreed, op=dist.ReduceOp.SUM)
        pinned = extra(".pinned", "a cache of several processes")
        try:
            return pinned.share([rows], leads=self.plans, total=total)[0]
        except OSError as error:
            size = readable_size(math.prod(rows.shape) * rows.dtype.itemsize)
            raise StoreError(f"no memory for rows of {size} in host memory: {error}") from error

    def rows(self, ids):
        """Send rows int [n] -> those of all processes in the one that plans, none in the others."""
        received = [ids[:0]] * self.world
        dist.gather_object(ids, received if self.plans else None, self.first, self.group)
        return torch.cat(received)


def read_in_order(reader, pages):
    """Have the kernel read the first pages of a file in order, which a disk delivers many times as fast as at random."""
    end = pages * mmap.PAGESIZE
    for at in range(0, end, AHEAD):
        os.posix_fadvise(reader.file, at, min(AHEAD, end - at), os.POSIX_FADV_WILLNEED)


class Tiers(NamedTuple):
    """Where the rows of features on disk are, for all processes of a machine."""

    host: int  # bytes of the hottest rows in host memory, behind those in GPU memory
    room: int  # bytes of pages in the page cache
    reads: float  # pages that a batch is expected to read from the disk
    line: str


def expected_reads(visits, row_bytes, room, processes=1):
    """Estimate the pages that a batch reads from the disk if the pages used soonest are kept in `room` bytes: those whose next
    use is less than some number of batches away, as if batches were independent and no row began within a page that it leaves.

    visits: [n] probabilities that a batch reads a row, 0 for rows in memory. processes: that read batches at the same time.
    """
    unused = torch.log1p(-visits.clamp(max=1 - 1e-6)) * processes
    rows = max(1, mmap.PAGESIZE // row_bytes)  # of a page
    unused = torch.nn.functional.pad(unused, (0, -len(unused) % rows))
    used = -torch.expm1(unused.view(-1, rows).sum(1))  # probability of each page
    pages = max(1, row_bytes / mmap.PAGESIZE)  # of a row
    places = room / (pages * mmap.PAGESIZE)
    near = 0.0  # batches
    step = 1e7
    while step > 0.01:
        step /= 2
        uses = used * (near + step)
        if float((1 - (-uses).exp() * (1 + uses)).sum()) < places:
            near += step
    return pages * float((used * (-used * near).exp()).sum()) / processes


def settled_tiers(rows, visits, gpu=0, host=0, processes=1):
    """Settle how much of which memory keeps rows of `MappedRows`, and pages -> Tiers. gpu: bytes of rows of each process.
    host: bytes of rows of all; 0: that one of SHARES with which fewest reads are expected. visits: [V], see
    `expected_visits`."""
    row_bytes = rows.shape[1] * rows.dtype.itemsize
    free = max(0, rows.room())
    total = float(visits.sum()) or 1.0

    def tiers(host):
        kept = visits.topk(min(len(visits), (gpu + host) // row_bytes))
        on_gpu = float(kept.values[: gpu // row_bytes].sum()) / total
        either = float(kept.values.sum()) / total
        room = max(0, min(int(ROOM * (free - host)), len(visits) * row_bytes))
        reads = expected_reads(visits.index_fill(0, kept.indices, 0), row_bytes, room, processes)
        on_gpus = f"{readable_size(gpu)} on each GPU ({on_gpu:.0%} of a batch), "
        line = (
            f"rows on disk: {on_gpus if gpu else ''}{readable_size(host)} in host memory "
            f"({either - on_gpu:.0%} of a batch), pages of {readable_size(room)}; "
            f"a batch reads about {reads:,.0f} pages from the disk"
        )
        return Tiers(host, room, reads, line)

    choices = [host] if host else [int(free * share) for share in SHARES]
    return min(map(tiers, choices), key=lambda tiers: tiers.reads)


def reads_per_second(rows):
    """Measure how many pages of random rows of `MappedRows` a disk delivers, past the page cache; a row takes at least one."""
    ids = torch.randint(rows.shape[0], (1 << 13,))
    out = torch.empty(len(ids), rows.shape[1], dtype=rows.dtype)
    reader = rows.reader(direct=True)
    began = time.perf_counter()
    reader.read(ids, out)
    pages = len(ids) * max(1, reader.row_bytes / mmap.PAGESIZE)
    return pages / (time.perf_counter() - began)


class LookaheadCache(CachedFeatures):
    """Features on disk behind two caches: `budget` bytes of host memory for the hottest rows, and the page cache for
    the pages used soonest.

    Beyond `budget` it takes 4 bytes per node, the window's blocks and, with planned pages, 20 bytes per 4 KiB page.

    Args:
        features: `MappedRows`. budget: bytes of rows to keep in memory.
        lookahead: batches in the window; None: enough to use each page TOUCHES times, while their blocks fit into a
            quarter of the budget plus a 32nd of `room`, and into half of `room`; 0 where no pages are planned.
        hot: [V] scores, such as `expected_visits`; the rows with the highest are kept in memory.
        batches: expected number of batches (None: unknown); short runs plan no pages.
        together: `Together` of the processes of this machine that read the table; they gather equally often.
        room: bytes of pages to keep in the page cache; None: most of what is free, if that is enough to keep any.
        nearer: int32 [V], not -1 for the rows that a cache in front keeps, see `CachedFeatures`: they are never asked for.

    Attributes (others: `CachedFeatures`):
        room: bytes of the page cache to fill with pages; 0: it is left to the kernel, or bypassed (O_DIRECT).
    """

    def __init__(
        self,
        features,
        budget,
        lookahead=None,
        *,
        hot=None,
        batches=None,
        together=None,
        room=None,
        nearer=None,
    ):
        shape = tuple(features.shape)
        dtype = features.dtype
        reader = features.reader(None if room is None else not room)
        if library("pages") is None or reader is None:
            raise StoreError("a cache that looks ahead needs Linux and a C compiler")
        self.reader = reader
        self.budget = budget
        self.lookahead = lookahead
        self.batches = batches
        self.together = together
        if room is None:
            room = features.stays() * max(0, int(ROOM * features.room()))
        self.room = 0 if reader.direct else min(room, shape[0] * reader.row_bytes)

        def gather(ids, out):
            return reader.read(ids, torch.empty(len(ids), shape[1], dtype=dtype))

        table = types.SimpleNamespace(shape=shape, dtype=dtype, gather=gather)
        hot = torch.zeros(shape[0]) if hot is None else hot
        if nearer is not None:
            hot = hot.masked_fill(nearer >= 0, -1)
        super().__init__(table, hot, budget, keep=together and together.keep)
        self.collective = bool(together)
        self.on_disk = self.position < 0  # bool [V]: rows that are in no cache
        if nearer is not None:
            self.on_disk &= nearer < 0
        # drop the pages just read: their rows are copied
        os.posix_fadvise(reader.file, 0, 0, os.POSIX_FADV_DONTNEED)
        self.pages = None  # KeptPages, made when the first batch shows how large a window is
        self.started = False
        self.given_up = deque()  # (number of a batch, pages to drop once that batch is gathered)
        # batches so far
        self.planned = 0
        self.gathered = 0
        self.gathered_by_all = 0
        # pages of rows on disk, over the batches planned so far: used, and not in the page cache by plan
        self.pages_used = 0
        self.pages_read = 0

    def counts(self):
        """Return counts since the start: share of rows hit in memory, rows gathered, rows hit, bytes read from disk or page
        cache, pages used and pages read from the disk by plan; tiers: shares of the rows that were in memory, and on pages
        kept by plan."""
        kept = 1 - self.pages_read / self.pages_used if self.pages_used else 0.0
        return {
            **super().counts(),
            "tiers": {"host": self.hit_rate, "pages": (1 - self.hit_rate) * kept},
            "rows": self.lookups,
            "hits": self.hits,
            "bytes_read": self.reader.bytes_read,
            "pages_used": self.pages_used,
            "pages_read": self.pages_read,
        }

    @contextmanager
    def looking_ahead(self, batches):
        """Context manager: iterator over `batches`, in order, each handed out once the window behind it is known. One
        thread draws and plans batches, another starts to read their pages. The window is emptied at the end."""
        planned = self._planned(batches)
        options = {"depth": 2, "finish": self.collective}
        # the items are dummies: the function that prefetch calls takes the next planned batch
        ahead = prefetch(lambda _, slot: next(planned, None), itertools.count(), **options)
        plans = itertools.takewhile(bool, ahead)
        begun = prefetch(lambda plan, slot: self._begin(*plan), plans, **options)
        try:
            with closing(planned), closing(ahead), closing(begun):
                yield begun
        finally:
            self.gathered = self.planned
            if self.pages:
                self.pages.forget()

    def _planned(self, batches):
        """Yield (batch, pages to read for it), each once the window behind the batch is full."""
        window = deque()
        passed_on = 0
        for batch in batches:
            nodes = batch.blocks[0].src_nodes
            nodes = nodes[nodes < self.shape[0]]
            nodes = nodes[self.on_disk.index_select(0, nodes)]
            if not self.started:
                self._start(batch, len(nodes))
            window.append(batch)
            if self.room and self.together:
                nodes = self.together.rows(nodes)
            if self.pages:
                self.pages.expect(nodes)
            while len(window) > min(self.lookahead, RAMP * (passed_on + 1)):
                passed_on += 1
                yield window.popleft(), self._plan()
        while window:
            yield window.popleft(), self._plan()

    def _plan(self):
        """Plan the oldest batch of the window -> pages to read for it, or None where no pages are planned, or by another
        process."""
        if not self.room:
            return None
        self.planned += 1
        if self.together:
            self.gathered_by_all = self.together.agreed(self.gathered)[0]
        if not self.pages:
            return None
        missing, evicted = self.pages.plan()
        self.pages_used += self.pages.used
        self.pages_read += len(missing)
        self.given_up.append((self.planned, evicted))
        return missing

    def _begin(self, batch, missing):
        """Start to read the pages that a batch lacks, and drop those evicted by batches gathered so far -> batch."""
        if self.pages:
            self.pages.advise(missing, True)
            gathered = self.gathered_by_all if self.together else self.gathered
            while self.given_up and self.given_up[0][0] <= gathered:
                self.pages.advise(self.given_up.popleft()[1], False)
        return batch

    def _start(self, batch, rows):
        """Choose the window and start to fill the page cache; all batches are taken to be as large as the first, and to
        have as many `rows` on disk."""
        self.started = True
        row_bytes = self.reader.row_bytes
        table = self.shape[0] * row_bytes  # bytes
        world = self.together.world if self.together else 1
        # bytes of the pages that a batch of all processes reads
        touched = world * max(1, rows) * max(row_bytes, mmap.PAGESIZE)
        if self.batches is not None and self.batches * touched < table:
            self.room = 0
        if self.lookahead is None:
            size = 20 * max(1, rows)
            for block in batch.blocks:
                size += sum(tensor.nbytes for tensor in block if tensor is not None)
            fitting = min(self.budget / 4 + self.room / 32, self.room / 2) / world / size
            self.lookahead = int(min(TOUCHES * table / touched, fitting)) + 1 if self.room else 0
            # the window is in the memory that was counted as pages'
            self.room = max(0, self.room - int(self.lookahead * world * size))
            self.lookahead *= self.room > 0
        if self.together:
            self.room, self.lookahead = self.together.agreed(self.room, self.lookahead)
        if not self.room or self.together and not self.together.plans:
            return
        places = -(-self.room // mmap.PAGESIZE)  # as many as fit, from the start of the file
        self.pages = KeptPages(self.reader, places, self.lookahead)
        threading.Thread(
            target=read_in_order, args=(self.reader, places), name="in order", daemon=True
        ).start()

    def gather(self, ids, out=None):
        """Copy rows `ids` [n] to `out`, or a new tensor, [n, F]; StoreError if the disk fails."""
        out = super().gather(ids, gather_target(self, ids, out))
        self.gathered += 1
        return out

    def _read(self, ids, misses, out, missing):
        self.reader.read(ids[misses], out, misses)


def flags(kinds):
    """Declare the flag of the cache that looks ahead."""
    return {
        "mode": dict(
            lookahead=kinds.free(
                kinds.COUNT_OR_0,
                None,
                "keep the pages used soonest in the next N batches (default: three uses of each)",
            )
        )
    }
