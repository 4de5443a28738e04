"""Tests: disk/reader.py, extras/lookahead.py."""

import ctypes
import itertools
import mmap
import os
import re
import threading
import time
import types
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import ddp
import loader
import store
import train
from disk import files, reader
from disk.files import StoreError
from extras import cache, lookahead
from extras.lookahead import LookaheadCache
from features import CachedFeatures, FeatureRing
from native import build
from run import placement
from sampler import NeighborSampler
from sources import prepare
from store import GraphStore, build_store
from tests.common import (
    _end,
    _fork,
    _graph,
    _in_child,
    _log,
    _same_weights,
    _split,
    _store,
    _threads,
)
from tests.stores import _events, _refuses

# disk/reader.py


def _table(tmp_path, rows, row_bytes, offset=4096, **options):
    """Make a file of random bytes behind a header of `offset` bytes -> (its file, uint8 [rows, row_bytes], reader)."""
    table = np.random.default_rng(0).integers(0, 256, (rows, row_bytes), np.uint8)
    path = tmp_path / "table"
    path.write_bytes(bytes(offset) + table.tobytes())
    if reader.library() is None:
        pytest.skip("no C code: a Linux with a C compiler is needed")
    opened = reader.RowReader(path, offset, row_bytes, rows, **options)
    return path, torch.from_numpy(table), opened


def _empty(rows, row_bytes):
    return torch.zeros(rows, row_bytes, dtype=torch.uint8)


def test_places_and_ids_out_of_range_are_refused(tmp_path):
    """C code wrote past the end of `out` and of its lists."""
    _, _, rows = _table(tmp_path, 9, 8)
    ids, out = torch.arange(2), _empty(2, 8)
    for bad in (-1, 9):
        said = f"node {bad} is out of range"
        _refuses(said, rows.read, torch.tensor([0, bad]), out, error=IndexError)
    _refuses("node 2 is out of range", rows.read, ids, out, ids + 1, error=IndexError)
    pages = lookahead.KeptPages(rows, 1 << 24, 2)  # more than there are
    _refuses("node 1000000 is out", pages.expect, torch.tensor([10**6]), error=IndexError)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "row_bytes, offset",
    [(1, 128), (400, 128), (512, 4096), (1000, 4096), (4096, 128), (70_000, 4096)],
)
def test_rows_are_read_from_the_disk_as_they_lie_there(row_bytes, offset, direct, tmp_path):
    size = max(40, 500_000 // row_bytes)
    _, table, rows = _table(tmp_path, size, row_bytes, offset, direct=direct)
    rng = np.random.default_rng(1)
    for ids in (rng.integers(0, size, 700), np.arange(size)[::-1][:300], [0, size - 1, 0], []):
        ids = torch.as_tensor(np.array(ids, np.int64))
        out = _empty(len(ids), row_bytes)
        assert rows.read(ids, out) is out and torch.equal(out, table[ids])
        places = torch.from_numpy(rng.permutation(2 * len(ids))[: len(ids)])
        out = _empty(2 * len(ids), row_bytes)
        assert torch.equal(rows.read(ids.int(), out, places)[places], table[ids])
        assert out.any(1).sum() <= len(ids)  # and no other row was touched


def test_neighbouring_rows_are_one_request_and_bytes_are_counted(tmp_path):
    _, _, rows = _table(tmp_path, 1000, 1024)
    if not rows.direct:
        pytest.skip("this file system has no direct reads")
    # gaps of less than a page are read, too: a page between two rows may have been dropped by plan
    ids = torch.tensor([4, 0, 11, 7, 8, 8, *range(200, 500), 999])
    rows.read(ids, _empty(len(ids), 1024))
    assert rows.bytes_read == 1024 * (12 + 300 + 1)
    rows.read(torch.tensor([16, 6, 11]), _empty(3, 1024))
    assert rows.bytes_read == 1024 * (12 + 300 + 1 + 3)


def test_many_threads_and_forked_processes_read_with_one_reader(tmp_path):
    _, table, rows = _table(tmp_path, 3000, 600)

    def read():
        ids = torch.from_numpy(np.random.default_rng().integers(0, 3000, 100))
        assert torch.equal(rows.read(ids, _empty(100, 600)), table[ids])

    with _threads(read, 6):
        assert [_in_child(lambda: [read() for _ in range(20)]) for _ in range(3)] == [0] * 3
    read()


def test_a_file_that_was_cut_short_is_one_sentence_and_the_reader_works_on(tmp_path):
    path, table, rows = _table(tmp_path, 1000, 1000)
    whole, out = path.read_bytes(), _empty(100, 1000)
    for length in (4096 + 900_500, 4096 + 500, 0):
        os.truncate(path, length)
        said = "cannot be read at byte [0-9,]+: it was cut short"
        _refuses(said, rows.read, torch.arange(901, 1000), out)
    assert torch.equal(rows.read(torch.arange(0), out[:0]), out[:0])
    path.write_bytes(whole)
    ids = torch.randint(1000, (100,))
    assert torch.equal(rows.read(ids, out), table[ids])


FLAKY = """typedef int64_t i64;
static ssize_t flaky(int file, void *to, size_t count, off_t offset) {
  static int count_of_reads;
  int turn = __sync_fetch_and_add(&count_of_reads, 1);
  if (turn % 7 == 3) usleep(20000);
  errno = FAILS ? EIO : turn % 5 == 1 ? EINTR : turn % 5 == 2 ? EAGAIN : 0;
  if (errno) return -1;
  return pread(file, to, turn % 5 == 3 && count > 1024 ? count / 1024 * 512 : count, offset);
}
#define pread flaky"""


def _flaky(fails):
    """Return the reader's C code for a device that is slow, reads short, is interrupted and, if `fails`, broken."""
    text = build.read_source("rows.c")
    return text.replace("typedef int64_t i64;", FLAKY.replace("FAILS", fails), 1)


@pytest.mark.parametrize("direct", [True, False])
def test_short_and_interrupted_reads_go_on_and_errors_are_a_sentence(direct, tmp_path, monkeypatch):
    text = _flaky("offset > 4096 + 950 * 3000")
    monkeypatch.setattr(build, "read_source", lambda file: text)
    reader.library.cache_clear()
    try:
        _, table, rows = _table(tmp_path, 1000, 3000, direct=direct)
        ids, out = torch.randint(900, (2000,)), _empty(2000, 3000)
        assert torch.equal(rows.read(ids, out), table[ids])
        said = r"table cannot be read at byte [0-9,]+: Input/output error"
        for _ in range(3):
            _refuses(said, rows.read, torch.randint(1000, (2000,)), out)
            assert torch.equal(rows.read(ids, out), table[ids])
    finally:
        reader.library.cache_clear()


# extras/lookahead.py: what is planned


def _planner(pages, row_bytes, places, window, offset=0):
    if lookahead.library("pages") is None:
        pytest.skip("no C compiler")
    table = types.SimpleNamespace(path="t", offset=offset, rows=pages, row_bytes=row_bytes)
    return lookahead.KeptPages(table, places, window)


class _Pages:
    """Carries out the decisions of KeptPages; row i of the table is page i."""

    def __init__(self, pages, places, window):
        self.planner, self.places = _planner(pages, mmap.PAGESIZE, places, window), places
        # what is there, read in order before training starts
        self.kept, self.misses, self.waiting = set(range(places)), 0, deque()

    def expect(self, batch):
        self.planner.expect(torch.tensor([*batch], dtype=torch.int64))
        self.waiting.append(set(batch))

    def plan(self):
        batch = self.waiting.popleft()
        missing, dropped = (pages.tolist() for pages in self.planner.plan())
        assert missing == sorted(batch - self.kept) and dropped == sorted(set(dropped))
        assert set(dropped) <= self.kept | batch
        self.kept = (self.kept | batch) - set(dropped)
        assert len(self.kept) == self.places
        self.misses += len(missing)

    def run(self, trace, window):
        for batch in trace:
            self.expect(batch)
            if len(self.waiting) > window:
                self.plan()
        while self.waiting:
            self.plan()


def _min_reads(trace, places):
    """Count the misses of Belady's MIN, the fewest possible: each batch keeps the pages with the nearest next use."""
    kept, misses = set(range(places)), 0
    for t, batch in enumerate(trace):
        misses += len(batch - kept)
        rest = range(t + 1, len(trace))
        next_use = {p: next((u for u in rest if p in trace[u]), 1000) for p in kept | batch}
        kept = set(sorted(next_use, key=next_use.get)[:places])
    return misses


@pytest.mark.parametrize("pages, count, most, traces", [(7, 9, 5, 40), (300, 200, 40, 1)])
def test_a_longer_window_reads_less_down_to_the_fewest_reads(pages, count, most, traces):
    rng = np.random.default_rng(0)
    for _ in range(traces):
        draws = [rng.random(rng.integers(most)) for _ in range(rng.integers(count // 2, count))]
        trace = [set((pages * draw**2).astype(int).tolist()) for draw in draws]
        for places in (0, 1, pages // 10, pages // 2, pages):
            reads = []
            for window in (0, 3, 50, count):
                planned = _Pages(pages, places, window)
                planned.run(trace, window)
                reads.append(planned.misses)
            assert reads[-1] == _min_reads(trace, places), trace
            assert traces > 1 or reads == sorted(reads, reverse=True), reads


def test_what_is_forgotten_is_not_planned():
    """Batches are expected, planned or all forgotten in any order: the record of kept pages stays right."""
    rng, pages = np.random.default_rng(0), _Pages(10, 4, 6)
    for _ in range(3000):
        what = rng.integers(9)
        if what < 5 and len(pages.waiting) < 6:
            pages.expect(rng.permutation(10)[: rng.integers(6)].tolist())
        elif what < 8 and pages.waiting:
            pages.plan()
        elif what == 8:
            pages.planner.forget()
            pages.waiting.clear()
    assert 100 < pages.misses < 4000


ROWS = [(4096, 1024), (128, 400), (4096, 4096), (192, 5000), (0, 1)]


@pytest.mark.parametrize("offset, row_bytes", ROWS)
def test_the_pages_of_rows(offset, row_bytes):
    ids, pages = torch.randint(300, (50,)), _planner(300, row_bytes, 0, 1, offset)
    ends = [(offset + i * row_bytes, offset + (i + 1) * row_bytes - 1) for i in ids.tolist()]
    expected = {page for first, last in ends for page in range(first // 4096, last // 4096 + 1)}
    pages.expect(ids.int())
    assert [pages.tolist() for pages in pages.plan()] == [sorted(expected)] * 2


# extras/lookahead.py: what is read


def _large(tmp_path, monkeypatch, width=24, num_nodes=600):
    """Make a store whose features stay on disk -> GraphStore; `.x` holds them in memory."""
    x = torch.randn(num_nodes, width, generator=torch.Generator().manual_seed(0))
    edges = np.random.default_rng(0).integers(0, num_nodes - 3, (2, 12 * num_nodes))
    path = _store(tmp_path / "g", num_nodes, features=x, edge_index=edges)
    monkeypatch.setattr(files, "free_host_bytes", lambda: 1000)
    graph = GraphStore.open(path)
    graph.x = x
    if graph.features.reader() is None or lookahead.library("pages") is None:
        pytest.skip("no C compiler, or no Linux")
    return graph


def _loader(graph, features=None, batch_size=2, depth=2, nodes=None, **options):
    """Return a loader over the training nodes, fanout 3,3, that gathers from `features`."""
    ring = features and FeatureRing(features, graph.labels, slots=depth + 1)
    nodes, options = graph.split["train"][:nodes], {**options, "depth": depth, "ring": ring}
    return loader.NodeLoader(graph, nodes, [3, 3], batch_size=batch_size, **options)


def _right(batches, graph):
    """Yield the batches after asserting that their features are right."""
    for batch in batches:
        assert torch.equal(batch.x, graph.x[batch.blocks[0].src_nodes.long()])
        yield batch


def _advice(tensor):
    """Return the kernel's flags of the memory map that holds a tensor: "rr" if read-ahead is off."""
    maps = Path("/proc/self/smaps").read_text()
    for first, end, flags in re.findall(r"(?ms)^(\w+)-(\w+) .*?^VmFlags: (.*?)$", maps):
        if int(first, 16) <= tensor.data_ptr() < int(end, 16):
            return flags.split()


def test_a_graph_on_disk_is_sampled_by_many_threads_to_the_same_blocks(tmp_path, monkeypatch):
    graph = _large(tmp_path, monkeypatch)
    assert "rr" in _advice(graph.sampled_indices) and "rr" not in _advice(graph.indices)
    assert graph.sampling_threads == store.SAMPLERS
    drawn = loader.NodeLoader(graph, graph.split["train"], [3, 3], batch_size=50)
    assert drawn.node_sampler.indices.data_ptr() == graph.sampled_indices.data_ptr()
    for batch in _right(drawn, graph):
        alone = NeighborSampler(graph.indptr.clone(), graph.indices.clone(), [3, 3])
        expected = alone.sample(batch.seeds, batch.global_step)
        for block, other in zip(batch.blocks, expected, strict=True):
            assert all(torch.equal(*pair) for pair in zip(block[:3], other[:3], strict=True))
    monkeypatch.undo()
    graph = GraphStore.open(graph.path)
    assert graph.sampling_threads is None and graph.sampled_indices is graph.indices


def test_rows_go_through_the_page_cache_where_it_can_keep_a_share_of_them(tmp_path, monkeypatch):
    graph = _large(tmp_path, monkeypatch)
    table, edges = graph.x.nbytes, graph.indptr.nbytes + graph.indices.nbytes
    if not graph.features.reader().direct:
        pytest.skip("this file system has no direct reads")

    def opened(free):
        monkeypatch.setattr(files, "free_host_bytes", lambda: free)
        return GraphStore.open(graph.path).features

    half, all_ = edges + table // 2, edges + table
    given = (half, 0, False), (half - 1, 0, True), (half, 1, True), (all_, table // 2, False)
    part = edges + table // 6
    parts = (part + 1, 0, False, 1 / 3), (part - 1, 0, True, 1 / 3)  # of other machines the rest
    for free, beside, direct, *share in (*given, *parts):
        features = opened(free)
        features.reserve(beside, *share)
        readers = features.reader(), features._reader  # that of a cache; that of `gather`, if large
        assert {reader.direct for reader in readers if reader} == {direct}


@pytest.mark.parametrize(
    "budget, window", [(0, 3), (96 * 50, 0), (96 * 50, 1), (96 * 200, None), (10**6, 100)]
)
def test_batches_through_a_lookahead_cache_are_the_same(budget, window, tmp_path, monkeypatch):
    graph, threads_before, found = _large(tmp_path, monkeypatch), threading.active_count(), []
    hot = torch.rand(600, generator=torch.Generator().manual_seed(0))
    for depth, threads in ((0, 1), (2, 1), (3, 4)):
        rows = LookaheadCache(graph.features, budget, window, hot=hot)
        batches = _loader(graph, rows, 4, depth, threads=threads)
        for _ in range(2):
            asked = sum(batch.blocks[0].num_src for batch in _right(batches, graph))
        found.append(counts := rows.counts())
        assert counts["rows"] > asked and counts["hits"] <= counts["rows"]
        assert (counts["hits"] > 0) is (budget > 0)
        if budget == 10**6:  # all rows, read once
            assert counts["bytes_read"] < 600 * 96 + 4096 and counts["hits"] == counts["rows"]
        for _ in itertools.islice(_right(batches, graph), 5):
            pass  # what was planned and not fetched is given up
        assert len([*_right(batches, graph)]) == len(batches) - 5
        # beside the batches
        assert torch.equal(rows.gather(torch.tensor([5, 5, 0])), graph.x[[5, 5, 0]])
    assert threading.active_count() == threads_before
    assert found[0] == found[1] == found[2]  # whatever the threads


@pytest.mark.parametrize("on_gpu, budget", [(0, 0), (100, 0), (100, 150), (0, 150), (300, 300)])
def test_hits_of_each_tier_are_those_of_a_count_by_hand(on_gpu, budget, tmp_path, monkeypatch):
    """Rows kept by a cache in front were planned, and their pages read and kept, as if they were asked for."""
    graph, file = _on_disk(tmp_path, monkeypatch, 256)
    hot = torch.rand(6000, generator=torch.Generator().manual_seed(0))
    order = hot.argsort(descending=True)
    front, host = order[:on_gpu].tolist(), order[on_gpu:][:budget].tolist()
    monkeypatch.setattr(lookahead, "read_in_order", lambda *words: None)
    behind = partial(LookaheadCache, graph.features, 1024 * budget, 40, hot=hot)
    cache = CachedFeatures(graph.features, hot, 1024 * on_gpu, behind=behind)
    before = cache.features.hits, cache.features.lookups, cache.features.reader.bytes_read
    asked = []

    def gather(ids, out=None):
        def missing(rest):  # as a ring uploads them
            asked.append(rest)
            return cache.features.gather(rest)

        return CachedFeatures.gather(cache, ids, out, missing)

    monkeypatch.setattr(cache, "gather", gather)
    planner = _Pages(1 + 6000 // 4, -(-cache.features.room // 4096), 40)
    rows = hits = seconds = used = planned = 0
    for batch in _right(_loader(graph, cache, 4), graph):
        nodes = batch.blocks[0].src_nodes.tolist()
        rest = {*nodes} - {*front}
        rows += len(nodes)
        hits += len(nodes) - len(rest)
        seconds += len(rest & {*host})
        # behind a header of one page, in the order of the batch
        pages = [*dict.fromkeys(1 + n // 4 for n in nodes if n not in {*front, *host})]
        used += len(pages)
        planner.expect(pages)
        while len(planner.waiting) > min(40, lookahead.RAMP * (planned + 1)):
            planner.plan()
            planned += 1
    while planner.waiting:
        planner.plan()
    counts = cache.counts()
    assert counts["rows"] == rows - hits == sum(map(len, asked))
    assert (counts["hits"], counts["pages_used"]) == (seconds, used)
    assert counts["pages_read"] == planner.misses > 0 and before == (0, 0, before[2])
    tiers = [
        hits / rows,
        seconds / rows,
        (1 - planner.misses / used) * (1 - (hits + seconds) / rows),
    ]
    assert [*counts["tiers"].values()] == pytest.approx(tiers)


def _resident(file):
    """Return which pages of a file are in the page cache -> bool array, without mapping or touching any."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(file, "rb") as data, mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        found = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(memory, np.uint8)
        size, pointers = ctypes.c_size_t(len(memory)), (view.ctypes.data, found.ctypes.data)
        first, flags = map(ctypes.c_void_p, pointers)
        assert libc.mincore(first, size, flags) == 0
        del view
    return (found & 1).astype(bool)


def _on_disk(tmp_path, monkeypatch, width, share=0.5):
    """Make a store whose features go through a page cache with room for a share of them -> GraphStore, their file."""
    graph = _large(tmp_path, monkeypatch, width, num_nodes=6000)
    file = graph.path / "features.npy"
    beside = graph.indptr.nbytes + graph.indices.nbytes
    room = int(share * graph.x.nbytes / lookahead.ROOM) + 1
    monkeypatch.setattr(reader, "KEPT", 0)
    monkeypatch.setattr(files, "free_host_bytes", lambda: beside + room)
    x, graph = graph.x, GraphStore.open(graph.path)
    graph.x = x
    # the kernel may still be reading ahead of the header, in pieces that stay whole
    with open(file, "rb") as data:
        os.fsync(data.fileno())
        for _ in range(500):
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not _resident(file).any():
                return graph, file
            time.sleep(0.01)
    pytest.skip("this file system keeps all pages")


def _read_first(monkeypatch, file, pages):
    """Read that many pages of a file into the page cache before training, instead of the thread
    that reads in order: a page evicted while the disk still reads it stays."""
    monkeypatch.setattr(lookahead, "read_in_order", lambda *words: None)
    with open(file, "rb") as data:
        os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        missing = range(pages)
        for _ in range(9):  # a machine short of memory may evict some at once
            for page in missing:
                os.pread(data.fileno(), 1, int(page) * mmap.PAGESIZE)
            missing = np.flatnonzero(~_resident(file)[:pages])
    assert not len(missing)


def _told(monkeypatch):
    """Record, one entry a batch, the pages that plans give up and those that the kernel is told to drop; two lists."""
    planned, dropped, plan, advise = [], [], lookahead.KeptPages.plan, lookahead.KeptPages.advise

    def plans(self):
        missing, given_up = plan(self)
        planned.append(given_up)
        return missing, given_up

    def advises(self, pages, wanted):
        if not wanted:
            dropped.append(pages)
        advise(self, pages, wanted)

    monkeypatch.setattr(lookahead.KeptPages, "plan", plans)
    monkeypatch.setattr(lookahead.KeptPages, "advise", advises)
    return planned, dropped


@pytest.mark.parametrize("width, budget", [(256, 307200), (100, 0), (1300, 260_000)])
def test_the_page_cache_keeps_the_pages_that_are_planned(width, budget, tmp_path, monkeypatch):
    graph, file = _on_disk(tmp_path, monkeypatch, width)
    rows = LookaheadCache(graph.features, budget, 40)
    places = -(-rows.room // 4096)
    _read_first(monkeypatch, file, places)
    _, dropped = _told(monkeypatch)
    batches = _loader(graph, rows, depth=0, threads=1)
    twice = itertools.chain(_right(batches, graph), _right(batches, graph))
    most = max(int(_resident(file).sum()) for _ in twice)
    # pages of the batches that are read ahead, at most
    in_flight = 6 * 2 * 16 * {256: 1, 100: 1.2, 1300: 3}[width]
    assert places / 2 < most <= places + in_flight < len(_resident(file))
    assert sum(map(len, dropped)) > 100


def test_a_window_leaves_half_of_the_room_to_pages_or_there_is_none(tmp_path, monkeypatch):
    graph, _ = _on_disk(tmp_path, monkeypatch, 256, share=0.02)
    for room, kept in ((None, True), (1, False)):
        rows = LookaheadCache(graph.features, 2_000_000, room=room)
        before = rows.room
        next(iter(_loader(graph, rows, depth=0)))
        assert bool(rows.pages) == bool(rows.lookahead) == kept
        assert not kept or 0.4 * before < rows.room < 0.6 * before


def test_epochs_that_are_left_early_leave_no_pages_behind(tmp_path, monkeypatch):
    graph, _ = _on_disk(tmp_path, monkeypatch, 256)
    planned, dropped = _told(monkeypatch)
    rows = LookaheadCache(graph.features, 0, 40)
    for seed in range(12):
        assert len([*itertools.islice(_right(_loader(graph, rows, seed=seed), graph), 6)]) == 6
    waiting = [pages for _, pages in rows.given_up]
    told = sorted(torch.cat([*dropped, *waiting]).tolist())
    assert sorted(torch.cat(planned).tolist()) == told and len(planned) > 12 * 6


def _plans_together(ranks, folder):
    """Train on a rank's part of every batch, in whole epochs and one that is left, and compare the pages read by plan with
    those of one planner of both ranks' batches."""
    with pytest.MonkeyPatch.context() as patch:
        graph, _ = _on_disk(folder / str(ranks.rank), patch, 256)
        patch.setattr(lookahead, "read_in_order", lambda *words: None)
        together = lookahead.Together(ranks.group_here())
        hot = torch.rand(6000, generator=torch.Generator().manual_seed(0))
        rows = LookaheadCache(graph.features, 1024 * 300, 9, hot=hot, together=together)
        parts = [_loader(graph, None, 1, rank=rank, world=2) for rank in (0, 1)]
        mine = _loader(graph, rows, 1, rank=ranks.rank, world=2)
        planner = _Pages(1 + 6000 // 4, -(-rows.room // 4096), 9)
        planned = 0
        for _, *both in zip(_right(mine, graph), *parts):
            nodes = torch.cat([batch.blocks[0].src_nodes for batch in both])
            pages = 1 + nodes[rows.on_disk[nodes]].int() // 4
            planner.expect(dict.fromkeys(pages.tolist()))
            while len(planner.waiting) > min(9, lookahead.RAMP * (planned + 1)):
                planner.plan()
                planned += 1
        while planner.waiting:
            planner.plan()
        assert rows.counts()["pages_read"] == (0 if ranks.rank else planner.misses)
        assert planner.misses > 250 and (rows.pages is None) == bool(ranks.rank)
        assert len([*itertools.islice(_right(mine, graph), 5)]) == 5
        assert len([*_right(mine, graph)]) == len(mine) - 5
        assert ranks.gather(rows.planned) == [rows.planned] * 2


def test_processes_of_a_machine_plan_as_one_with_the_batches_of_all(tmp_path):
    for rank in "01":
        (tmp_path / rank).mkdir()
    _end(_fork(tmp_path / "out", ddp.launch, _plans_together, 2, tmp_path))


@pytest.mark.parametrize("row_bytes", [1024, 4096, 8192])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("processes", [1, 2])
def test_reads_are_expected_as_the_planner_reads(row_bytes, share, processes):
    rng = np.random.default_rng(0)
    visits = rng.random(800) ** 4 / 10
    room = int(share * 800 * row_bytes)
    planner = _planner(800, row_bytes, room // 4096, 300)
    reads = 0
    for i in range(900):
        steps = [np.flatnonzero(rng.random(800) < visits) for _ in range(processes)]
        planner.expect(torch.from_numpy(np.concatenate(steps)))
        if i >= 300:
            missing = len(planner.plan()[0])
            reads += missing * (i >= 600)
    expected = lookahead.expected_reads(torch.from_numpy(visits), row_bytes, room, processes)
    assert reads / 300 / processes == pytest.approx(expected, rel=0.25, abs=0.5)


def test_caches_are_placed_by_mode(tmp_path, monkeypatch, capsys):
    """In cpu-cuda --cache was all: the kernel decided which pages stay."""
    graph, _ = _on_disk(tmp_path, monkeypatch, 256)
    task = types.SimpleNamespace(store=graph, seeds_per_example=lambda plan: 1)
    task.seeds = lambda: graph.split["train"]
    used = types.SimpleNamespace(draws=lambda plan: [3, 3])
    plan = dict(split_features=False, lookahead=None, dry_run=False, batch_size=4, accumulate=1)
    plan["prefetch"] = 19  # and so 20 batches, of at least 50 rows
    free = files.free_host_bytes() - graph.features.beside - 20 * 50 * 1024
    for mode, size, front in (
        ("cpu-cuda", 102400, 100),
        ("cpu-cuda", 0, 0),
        ("cpu-cpu", 9 * 1024, 0),
    ):
        run = types.SimpleNamespace(mode=mode, cache=size, epochs=9, steps=99, **plan)
        task.store = graph = GraphStore.open(graph.path)
        rows = cache.cached(ddp.Ranks(), run, task, used, graph.features)
        host = rows.features if front else rows
        assert type(rows) is (CachedFeatures if front else LookaheadCache)
        assert type(host) is LookaheadCache and host.room and not host.reader.direct
        assert host.cache.nbytes + host.room < free
        assert (len(rows.cache) if front else 0) == front
        assert mode == "cpu-cuda" or len(host.cache) == 9
        assert int((~host.on_disk).sum()) == front + len(host.cache)
        printed = capsys.readouterr().out
        assert ("on each GPU" in printed) == bool(front) and "pages of " in printed
        run.dry_run = True
        assert cache.cached(ddp.Ranks(), run, task, used, graph.features) is graph.features
        printed = capsys.readouterr().out
        assert re.search(r"this disk: [\d,]+ random pages/s, at most [\d,.]+ batches/s", printed)
    run.cache = 9 << 20
    with pytest.raises(StoreError, match="--cache: rows of 6.14 MB do not fit into"):
        cache.cached(ddp.Ranks(), run, task, used, graph.features)


def test_few_batches_do_not_pay_for_pages(tmp_path, monkeypatch):
    graph, _ = _on_disk(tmp_path, monkeypatch, 256)
    for batches, kept in ((1, False), (1000, True)):
        rows = LookaheadCache(graph.features, 1024 * 300, batches=batches)
        next(iter(_loader(graph, rows, 20, 0)))
        assert (rows.pages is not None) is kept is bool(rows.room)


def test_a_failing_disk_leaves_the_cache_right(tmp_path, monkeypatch):
    graph = _large(tmp_path, monkeypatch)
    rows = LookaheadCache(graph.features, 96 * 300, 20)
    batches, read, turn = _loader(graph, rows), rows.reader.read, itertools.count()

    def fails(ids, out, places=None):
        if next(turn) % 7 == 5:
            raise StoreError("the disk fails")
        return read(ids, out, places)

    rows.reader.read, failures = fails, 0
    for _ in range(20):
        try:
            assert [*_right(batches, graph)]
        except StoreError:
            failures += 1
    assert failures > 10 and rows.hit_rate > 0


EVENTS = _events(2000, 30000)
ON_DISK = {  # columns, flags
    "int8": ({"feature_dtype": "int8"}, ""),
    "bf16": ({"feature_dtype": "bfloat16"}, "--model gcn"),
    "features of edges": ({"edge_features": EVENTS["edge_features"]}, "--model gat"),
    "times": ({name: EVENTS[name] for name in ("edge_time", "node_time")}, "--model gin"),
    "links": ({}, "--task link --model gcn"),
    "types": (None, "--model rgcn"),
}


def _with_little_memory(free, words):
    """Run train.py as if so many bytes were free, in a fork."""
    files.free_host_bytes = lambda root="/": free
    placement.choose_mode = lambda *_, **__: ("cpu-cpu", "", "")
    return train.main(words)


@pytest.mark.parametrize("procs", [1, 2])
@pytest.mark.parametrize("kind", ON_DISK)
def test_rows_on_disk_change_no_bit(kind, procs, tmp_path):
    """Trained with planned pages, resumed with another cache beside another run, evaluated on all neighbours."""
    columns, flags = ON_DISK[kind]
    if columns is None:
        mag = "synthetic-mag:scale=0.0005"
        path = prepare.prepare(mag, tmp_path, progress=False)
    else:
        ids = np.split(np.arange(1200), [900, 1100])
        split = dict(zip(("train", "valid", "test"), ids))
        path = build_store(tmp_path / "g", **_graph(2000, 30000, 64) | {"split": split}, **columns)
    free = sum(file.stat().st_size for file in path.iterdir())
    free -= (path / "features.npy").stat().st_size // 3
    common = f"--dataset {path} --gpus 0 --procs {procs} --mode cpu-cpu --fanout 4,4 --hidden 8"
    common += f" --batch-size 90 {flags}"

    def begin(name, words, function=train.main, *first):
        files = f"--checkpoint {name}.pt --log {name}.log"
        if "link" not in flags:
            files += f" --predict {name}.npy --predict-what logits"
        words = _split([common, files, words])
        return _fork(tmp_path / name, function, *first, words, cwd=tmp_path)

    _end(begin("memory", "--epochs 4"))
    little = _with_little_memory, free
    other = begin("other", "--epochs 4 --cache 5KB --lookahead 5", *little)
    _end(begin("disk", "--epochs 2 --cache 9KB --lookahead 7", *little))
    _end(begin("disk", "--epochs 4 --cache 12KB --lookahead 3 --resume auto", *little))
    _end(other)
    logs = [_log(tmp_path / f"{name}.log") for name in ("memory", "disk")]
    assert [entry["pages_used"] > 0 for entry in logs[1] if "epoch" in entry] == [True] * 4
    same = [
        [(e.get("loss"), e.get("valid_sampled"), e.get("exact")) for e in (*log[:2], *log[-3:])]
        for log in logs
    ]
    assert same[0] == same[1]
    assert _same_weights(*(tmp_path / f"{name}.pt" for name in ("memory", "disk", "other")))
    for file in tmp_path.glob("memory.npy"):
        assert file.read_bytes() == (tmp_path / "disk.npy").read_bytes()
