"""Tests: features.py."""

import functools
import gc
import itertools
import mmap
import os
import signal
import threading
import time
import types
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import features
from extras import cache
from extras import pinned as uva
from extras.int8 import CodedFeatures
from features import CachedFeatures, FeatureRing, expected_visits, place, prefetch, share
from model import gather_rows, self_and_mean
from native import layers as native_layers
from sampler import Block, NeighborSampler
from tests.common import _forkserver


def test_prefetch_never_gives_one_slot_to_two_live_results():
    rng, live, lock = np.random.default_rng(5), {}, threading.Lock()
    delays = rng.random(200) * 0.002

    def make(i, slot):
        with lock:
            assert slot not in live, f"slot {slot} still holds {live.get(slot)}"
            live[slot] = i
        time.sleep(delays[i])
        return i, slot

    for i, (item, slot) in enumerate(prefetch(make, range(200), depth=3, threads=3)):
        assert item == i and live[slot] == i
        time.sleep(delays[-i - 1])
        del live[slot]


def test_prefetch_hands_on_the_workers_exception_and_runs_ahead_no_further_than_depth():
    def make(item, slot):
        started.append(item)
        if item == 13:
            raise KeyError("feature row 7")  # raised in the worker
        return item

    started = []
    with pytest.raises(KeyError, match="feature row 7") as caught:
        list(prefetch(make, range(19), depth=2, threads=2))
    assert "raised in the worker" in str(caught.traceback[-1].statement)
    started.clear()
    stream = prefetch(make, iter(range(10**9)), depth=4, threads=2)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    time.sleep(0.05)  # workers run ahead meanwhile
    stream.close()
    assert len(started) <= 3 + 4
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]


# the ring


_COPIES = types.SimpleNamespace(  # stands in for CudaCopies; clones act as device memory
    stream=lambda slot, blocks=(): nullcontext(), copy=torch.clone, event=mock.Mock
)


def _seed_blocks(ids):
    return [Block(torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), ids)]


def test_features_ring_grows_by_powers_of_two():
    table, sizes = torch.randn(1000, 16), set()  # rows of 64 bytes
    ring = FeatureRing(table, torch.zeros(1000, dtype=torch.int64), slots=2)
    for n in (0, 8, 300, 10, 512, 513, 600, 1000, 1):
        for slot in (0, 1):
            assert torch.equal(ring.fetch(slot, _seed_blocks(torch.arange(n))).x, table[:n])
            sizes.add(ring.buffers["rows"][slot].numel())
    assert sizes == {0, 64 * 8, 64 * 512, 64 * 1024}
    assert [buffer.numel() for buffer in ring.buffers["rows"]] == [64 * 1024] * 2


@pytest.mark.parametrize("copies", [None, _COPIES])
def test_features_ring_aggregates_the_first_hop(copies):
    indptr, indices, seeds = _skewed(200)
    labels, seeds = torch.arange(200), seeds[:9]
    codes = torch.randint(-128, 128, (200, 3)).to(torch.int8)
    scale = torch.rand(2, 3)
    decoded = codes * scale[0] + scale[1]
    options = dict(slots=1, aggregate=self_and_mean, dtype=torch.float64)
    s = NeighborSampler(indptr, indices, [3, 2], backend="torch")
    bare, (plain, _) = s.sample(seeds, 5, relabel_outer=False), s.sample(seeds, 5)
    expected = self_and_mean(*plain[:2], decoded[plain.src_nodes.long()]).double()
    for rows in (decoded, CodedFeatures(codes, scale)):
        ring = FeatureRing(rows, labels, **options)
        ring.copies = copies
        batch = ring.fetch(0, bare)
        torch.testing.assert_close(batch.x, expected)
        assert ring.first_hop and torch.equal(batch.y, seeds)
    assert not FeatureRing(_Rows(decoded), labels, **options).first_hop
    # without a buffer, as on a GPU that reads the features in place: in its own type
    if not copies:
        kept = FeatureRing(decoded, labels, reuse=False, **options).fetch(0, bare)
        torch.testing.assert_close(kept.x, expected)
    # float32 rows in the slot, without a table of their codes
    ring = FeatureRing(CodedFeatures(codes, scale), labels, slots=1, gather=gather_rows)
    ids = torch.tensor([7, 199, 7])
    assert torch.equal(ring.fetch(0, _seed_blocks(ids)).x, decoded[ids])
    assert ring.buffers["rows"][0].numel() == 64
    gather = functools.partial(native_layers.gather_rows, codes, scale=scale)
    assert gather(ids, torch.empty(3, 3)) is not None
    with pytest.raises(IndexError, match="not all rows of features with 200 rows"):
        gather(torch.tensor([-1]), torch.empty(1, 3))


# placement and shared memory


class _Rows:
    """Features behind a gather method, like a store's. asked: the ids of each call."""

    def __init__(self, tensor):
        self.rows, self.shape, self.dtype, self.asked = tensor, tensor.shape, tensor.dtype, []

    def gather(self, ids, out=None):
        self.asked.append(ids.tolist())
        return torch.index_select(self.rows, 0, ids, out=out)


def _arrays(dtype=torch.float32):
    indptr, indices = torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 0], dtype=torch.int32)
    return [indptr, indices, torch.tensor([0, 1, 1]), torch.randn(3, 5).to(dtype)]


def test_features_place_keeps_or_copies(monkeypatch):
    arrays = _arrays()
    for mode in ("cpu-cpu", "cpu-cuda"):
        assert all(a is b for a, b in zip(place(*arrays, mode), arrays))
    monkeypatch.setattr(features, "CHUNK_BYTES", 40)  # two rows at a time
    for source in (arrays[3], _Rows(arrays[3])):
        # any device will do to see that it copies
        placed = place(*arrays[:3], source, "cuda-cuda")
        for a, b in zip(placed, arrays):
            assert torch.equal(a, b) and a.dtype == b.dtype and a.data_ptr() != b.data_ptr()
    with pytest.raises(ValueError, match="mode 'gpu' is unknown: choose one of cuda-cuda, pinned-"):
        place(*arrays, "gpu")


def test_features_share_alone_keeps_values_and_types():
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        arrays = [*_arrays(dtype), torch.zeros(0, 4)]
        for a, b in zip(share([*arrays, _Rows(arrays[3])]), [*arrays, arrays[3]]):
            assert torch.equal(a, b) and a.dtype == b.dtype
            assert not a.numel() or a.data_ptr() % mmap.PAGESIZE == 0  # a page has one owner


def _cudart(*codes):
    """Stand in for torch.cuda.cudart(); registering memory returns these codes, then 0."""
    cudart = mock.Mock(cudaError=int, cudaGetErrorString="text of {}".format)
    cudart.cudaHostRegister.side_effect = itertools.chain(codes, itertools.repeat(0))
    return cudart


def _starts(function):
    return [call.args[0] for call in function.call_args_list]


@pytest.fixture
def pinned(monkeypatch):
    """Return features.gpu_view for host memory, with a stand-in for CUDA's runtime."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: array.host)
    monkeypatch.setattr(uva, "PIECE_BYTES", mmap.PAGESIZE)

    def view(host, cudart):
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        return features.gpu_view(host, "cpu")

    return view


@pytest.mark.parametrize("spare, moved", [(0, 0), (87, 0), (88, 1), (208, 2)])
def test_features_pinned_graphs_move_to_the_gpu_that_has_room(spare, moved, monkeypatch):
    graph = {"indptr": torch.arange(11), "indices": torch.arange(30).int()}
    arrays = {**graph, "labels": torch.arange(10), "features": torch.ones(10, 3)}
    viewed = []
    monkeypatch.setattr(uva, "gpu_view", lambda array, device: viewed.append(array) or array)
    placed = place(*arrays.values(), "pinned-cuda", spare=spare)
    assert all(map(torch.equal, placed, arrays.values()))
    stay = [name for name, x in arrays.items() if not any(x is view for view in viewed)]
    assert stay == ["indptr", "indices"][:moved]


def test_features_registered_pieces_cover_memory_and_never_overlap(pinned, monkeypatch):
    page = mmap.PAGESIZE
    (memory,) = share([torch.zeros(13 * page, dtype=torch.uint8)])
    for nbytes in (1, page - 1, page, page + 1, 5 * page, 12 * page + 7):
        for piece in (page, 3 * page, 100 * page):
            monkeypatch.setattr(uva, "PIECE_BYTES", piece)
            pinned(memory[:nbytes], cudart := _cudart())
            calls = [call.args for call in cudart.cudaHostRegister.call_args_list]
            ends = [start + size for start, size, _ in calls]
            assert [start for start, _, _ in calls] == [memory.data_ptr(), *ends[:-1]]
            assert 0 <= ends[-1] - memory.data_ptr() - nbytes < page
            for start, size, flags in calls:
                assert start % page == size % page == 0 < size <= piece and flags == 2
    with pytest.raises(ValueError, match=r"does not start on a page: share\(\) it first"):
        pinned(memory[8:], cudart)


def test_features_gpu_view_registers_and_checks_every_code(pinned, monkeypatch):
    rows, wide = share([torch.zeros(50, 30), torch.randn(6, 7).bfloat16()])
    interface = uva._HostArray(wide).__cuda_array_interface__
    assert interface["shape"] == (6, 7) and interface["typestr"] == "<i2"
    assert interface["data"] == (wide.data_ptr(), False) and interface.get("strides") is None
    # a GPU without UVA
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: array.host.clone())
    with pytest.raises(RuntimeError, match="cannot read host memory in place"):
        pinned(rows, good := _cudart())
    registered, undone = map(_starts, (good.cudaHostRegister, good.cudaHostUnregister))
    assert registered == undone and len(undone) == 2
    words = r"cudaHostRegister of 4,096 bytes at 0x\w+ .* 712 \(text of 712\)"
    with pytest.raises(RuntimeError, match=words):
        pinned(rows, bad := _cudart(0, 712))
    assert _starts(bad.cudaHostUnregister) == [rows.data_ptr()]


def test_features_gpu_view_unregisters_before_the_memory_goes(pinned, monkeypatch):
    """Otherwise a later mapping at the same address could not be registered: CUDA error 712."""
    cudart, rows, done = _cudart(), share([torch.zeros(50, 30)])[0], []

    def as_tensor(array, device):
        view = array.host[:]
        view.array, view.view = array, lambda dtype: view  # it keeps the array, as torch's does
        return view

    cudart.cudaHostUnregister = lambda start: done.append(Path("/proc/self/maps").read_text())
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    view, address = pinned(rows, cudart), rows.data_ptr()
    del rows
    gc.collect()
    assert cudart.cudaHostRegister.call_count == 2 and not done
    del view
    gc.collect()
    waited, *maps = done
    assert waited == "waited" and len(maps) == 2
    assert all(f"{address:x}-" in text for text in maps)  # still mapped


def _total(rank, table, barrier):
    """All-reduce up to four numbers through table, float64 [ranks, 4], in shared memory."""

    def total(*values):
        table[rank, : len(values)] = torch.tensor(values, dtype=torch.float64)
        barrier.wait(60)
        sums = table[:, : len(values)].sum(0).tolist()
        barrier.wait(60)
        return sums

    return total


def _status(name, file):
    lines = Path(file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _shares(rank, table, barrier, results):
    leads, total = rank == 0, _total(rank, table, barrier)
    values = torch.arange(16 << 20).int().view(-1, 4) if leads else torch.empty(4 << 20, 4).int()
    shared, more = share([values, torch.ones(3)], leads=leads, total=total)
    del values
    checksum = int(shared.sum(dtype=torch.int64)) + int(more.sum())  # reads every page
    barrier.wait(60)
    results.put((checksum, _status("Pss_Shmem:", "/proc/self/smaps_rollup")))
    time.sleep(600)


def test_features_processes_share_one_copy_and_a_kill_leaves_nothing():
    before, files = _status("Shmem:", "/proc/meminfo"), set(os.listdir("/dev/shm"))
    context = _forkserver()
    barrier, results = context.Barrier(3), context.Queue()
    table = torch.zeros(3, 4, dtype=torch.float64).share_memory_()
    new = lambda i: context.Process(target=_shares, args=(i, table, barrier, results), daemon=True)  # noqa: E731
    processes = [new(i) for i in range(3)]
    for process in processes:
        process.start()
    try:
        checksums, pss = zip(*(results.get(timeout=90) for _ in processes))
        assert set(checksums) == {sum(range(16 << 20)) + 3}
        assert 64 << 20 <= sum(pss) < 66 << 20  # three mappings of one copy of 64 MiB
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    deadline = time.monotonic() + 10
    while _status("Shmem:", "/proc/meminfo") - before > 32 << 20 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _status("Shmem:", "/proc/meminfo") - before < 32 << 20
    # barrier: named, not ours
    assert all(file.startswith("sem.") for file in set(os.listdir("/dev/shm")) - files)


# the cache


def _skewed(num_nodes=2000):
    """Make a graph whose sources are drawn by rank^-0.8 -> (indptr, indices, 200 nodes to train on)."""
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 24, num_nodes)
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(degrees)]))
    weight = np.arange(1, num_nodes + 1) ** -0.8
    sources = rng.choice(num_nodes, int(indptr[-1]), p=weight / weight.sum())
    indices = torch.from_numpy(rng.permutation(num_nodes)[sources].astype(np.int32))
    return indptr, indices, torch.from_numpy(rng.permutation(num_nodes)[:200])


def _sampled(indptr, indices, train, fanouts, batch_size, batches):
    generator = torch.Generator().manual_seed(1)
    s = NeighborSampler(indptr, indices, fanouts, backend="torch")
    for step in range(batches):
        seeds = train[torch.randperm(len(train), generator=generator)[:batch_size]]
        yield s.sample(seeds, step)[0].src_nodes


@pytest.mark.parametrize("fanouts", [[4, 3], [2, 2, 2], [-1, 2]])
def test_features_expected_visits_are_what_sampling_counts(fanouts, monkeypatch):
    indptr, indices, train = _skewed()
    monkeypatch.setattr(cache, "CHUNK_EDGES", 1000)
    visits = expected_visits(indptr, indices, train, fanouts, 20)
    counts, batches = torch.zeros(2000), 600
    for ids in _sampled(indptr, indices, train, fanouts, 20, batches):
        counts[ids.long()] += 1
    seen = counts / batches
    assert abs(visits.sum() / seen.sum() - 1) < 0.03
    noise = (visits * (1 - visits) / batches).sqrt() + 1 / batches
    assert ((visits - seen).abs() / noise).mean() < 1.5, ((visits - seen).abs() / noise).mean()
    monkeypatch.setattr(cache, "CHUNK_EDGES", 1 << 22)
    assert torch.allclose(visits, expected_visits(indptr, indices, train, fanouts, 20), atol=1e-6)


def test_features_cache_gives_the_same_rows_for_any_budget(monkeypatch):
    monkeypatch.setattr(features, "CHUNK_BYTES", 1000)  # several pieces
    indptr, indices, train = _skewed(300)
    table = torch.randn(300, 7)
    visits = expected_visits(indptr, indices, train, [3, 2])
    ids = torch.randint(300, (500,), dtype=torch.int32)
    for budget in (0, 27, 28, 2800, 10**6):
        behind = _Rows(table)
        for source in (table, behind):
            cached = CachedFeatures(source, visits, budget)
            behind.asked.clear()
            out = torch.empty(500, 7)
            assert cached.gather(ids, out=out) is out and torch.equal(out, table[ids.long()])
            assert torch.equal(cached.gather(ids[:0]), table[:0]) and cached.shape == (300, 7)
        rows = min(300, budget // 28)
        hot = set(visits.topk(rows).indices.tolist())
        missed = [i for i in ids.tolist() if i not in hot]
        assert sum(behind.asked, []) == missed  # the misses alone
        assert cached.cache.shape[0] == rows
        assert cached.hit_rate == pytest.approx(1 - len(missed) / 500)
        # on the host; before the host, on a device
        for copies in (None, _COPIES):
            cache = CachedFeatures(behind, visits, budget)
            ring = FeatureRing(cache, torch.arange(300), slots=2)
            ring.copies = copies
            for slot in (0, 1, 0):
                x = ring.fetch(slot, _seed_blocks(ids[slot:])).x
                assert torch.equal(x, table[ids[slot:].long()])
            # before a device the slots hold misses alone
            sizes = [b.nbytes for b in ring.buffers["rows"]] if copies else []
            assert all(size <= 2 * 28 * len(missed) for size in sizes)


def test_features_cache_of_codes_is_decoded_where_the_gpu_looks_ids_up():
    """As in pinned-cuda, whose cache stands between the ring and codes that kernels could decode."""
    codes = torch.arange(60, dtype=torch.int8).view(20, 3)
    scale = torch.rand(2, 3)
    cache = CachedFeatures(codes, torch.rand(20), 30)
    rows = CodedFeatures(codes, scale).over(cache)
    ring = FeatureRing(rows, torch.arange(20), slots=1, gather=gather_rows)
    ring.on_device = True
    ids = torch.arange(20, dtype=torch.int32)
    assert torch.equal(ring.fetch(0, _seed_blocks(ids)).x, codes * scale[0] + scale[1])


def test_features_cache_counts_hits_from_many_threads():
    table = torch.randn(100, 2)
    cached = CachedFeatures(table, torch.arange(100.0), 50 * 8)
    gather = lambda ids, slot: cached.gather(ids)  # noqa: E731
    list(prefetch(gather, [torch.arange(100)] * 400, depth=8, threads=8))
    assert (cached.hits, cached.lookups) == (400 * 50, 400 * 100)


def test_misses_of_split_features_are_asked_for_at_once():
    """Also if sources repeat, as with times, and there are more of them than nodes: ranks have to ask equally often."""
    table = torch.randn(10, 2)
    exchange = mock.Mock(side_effect=lambda rows, *counts: rows, world=1, rank=0)
    split = features.SplitFeatures(table, [(10, 0)], exchange)
    cached = CachedFeatures(split, torch.arange(10.0), 3 * 8)
    exchange.reset_mock()
    ids = torch.arange(40) % 10
    assert torch.equal(cached.gather(ids), table[ids]) and exchange.call_count == 3
