"""Moving feature rows to the training step: a ring of reused buffers, prefetching, placement.

This file works alone: copy it into your own code. extras/cache.py keeps the hottest rows near, extras/split.py splits rows
over machines.

    indptr, indices, labels, features = place(indptr, indices, labels, features, "cpu-cuda")
    ring = FeatureRing(features, labels, slots=depth + 1, device="cuda")
    def load(item, slot):
        step, seeds = item
        with ring.stream(slot):
            return ring.fetch(slot, sampler.sample(seeds, step))
    for batch in prefetch(load, enumerate(batches), depth=depth):
        batch.wait()
        model(batch.blocks, batch.x)

A fresh tensor of a hundred megabytes costs more in page faults than the gather that fills it, and copies to a GPU
overlap with its work only from pinned memory. So a few buffers, the slots of the ring, are allocated once and reused.
A slot is refilled when both hold: the caller has asked for the batch after the one in it (`prefetch`), and copies out of
it to a GPU are done (`FeatureRing`).

"Features" are a tensor [V, F] or any object with .shape, .dtype and .gather(ids, out=None), such as an open store's. What
else they may say about themselves is listed at `Features`.
"""

import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch

try:
    from extras import elsewhere, extra

    __getattr__ = elsewhere(__name__)
except ImportError:

    def extra(*ask):
        """Refuse what takes extras/."""
        raise ImportError("copy the folder extras/ beside features.py")


# where graph and features live - where training runs
MODES = ("cuda-cuda", "pinned-cuda", "cpu-cuda", "cpu-cpu")
CHUNK_BYTES = 1 << 24  # rows copied at a time


# ---- the ring


class Batch(NamedTuple):
    """Mini-batch of one forward and backward pass, on the training device: this process's share of the pass's seeds.

    On CPU x is overwritten when the next batch is asked for, unless reuse=False. The tensors of CUDA graphs always are
    overwritten.
    """

    blocks: list = ()  # L blocks, outermost hop first
    # [N, F] features of blocks[0].src_nodes; [blocks[0].num_dst, 2F] if the ring aggregates the outermost hop
    x: torch.Tensor | None = None
    y: torch.Tensor | None = None  # [S] labels of the seeds
    # the fields from here to step_seeds are those of a batch of `NodeLoader`
    seeds: torch.Tensor | None = None  # [S] node ids, in host memory
    step: int = 0  # of the optimizer, within the epoch
    # step counted over all epochs, which keys all random draws; -1 without shuffling
    global_step: int = 0
    total: int = 0  # seeds of the whole step: all processes, all passes
    last: bool = True  # the step's last pass: the optimizer steps after it
    step_seeds: Any = None  # the seeds of the whole step, int [total]
    began: Any = None  # CUDA event: the copy of x to the GPU began; None if nothing is copied
    ready: Any = None  # CUDA event: all tensors are on the GPU; None on CPU
    edges: tuple = ()  # edge features [E, D] of each block, if the ring has edge_features

    def __repr__(self):
        parts = [f"blocks={self.blocks}"]
        for name in ("x", "y", "seeds"):
            value = getattr(self, name)
            parts.append(f"{name}={value if value is None else [*value.shape]}")
        return f"Batch({', '.join(parts)})"

    def wait(self):
        """Make the GPU's current stream wait for the copies; `record_stream` marks the tensors as used on it."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.x.device)
            stream.wait_event(self.ready)
            for tensors in (self.x, self.y, *self.edges, *self.blocks):
                tensors.record_stream(stream)
        return self


class CudaCopies:
    """The CUDA side of the ring: side streams, copies, events."""

    def __init__(self, device, streams):
        if not torch.cuda.is_available():
            raise ValueError(f"device is {device}: torch sees no CUDA GPU here; give device='cpu'")
        # before training's work: sampling is many small kernels, and the next step waits for the last
        self.streams = [torch.cuda.Stream(device, priority=-1) for _ in range(streams)]
        self.device = self.streams[0].device  # "cuda" would be GPU 0 in another thread
        self.follow()

    def follow(self):
        """Make the slots' streams wait for the current one, which may have written features and caches on the GPU."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))

    @contextmanager
    def stream(self, slot, blocks=()):
        """Run the body on the slot's stream, after pending work of the caller's stream if blocks are on the GPU."""
        caller = torch.cuda.current_stream(self.device)
        side = self.streams[slot % len(self.streams)]
        if caller != side and any(block.src_nodes.is_cuda for block in blocks):
            side.wait_stream(caller)
            for block in blocks:
                block.record_stream(side)
        # a new thread's current device is GPU 0 on every rank: it must not create a context there
        with torch.cuda.device(self.device):
            torch.cuda.set_stream(side)
            try:
                yield
            finally:
                torch.cuda.set_stream(caller)

    def copy(self, tensor):
        """Start a copy to the GPU on the current stream -> the tensor it fills."""
        return tensor.to(self.device, non_blocking=True)

    def event(self):
        """Record a timed event on the current stream."""
        return torch.cuda.current_stream(self.device).record_event(
            torch.cuda.Event(enable_timing=True)
        )


class FeatureRing:
    """Gather the features and labels of a batch into reused buffers and bring them to the training device.

    Buffer sizes are rounded up to a power of two, as the pinned allocator does anyway. Gathers use torch's threads;
    `prefetch` may run several at once.

    Args:
        features: [V, F] of any dtype, in host memory or on the device. If only the first nodes have features, fewer
            rows: x then has rows for these nodes only.
        labels: int64 [V]. slots: number of slots: depth + 1 of `prefetch`.
        device: where training runs. On CUDA, buffers are pinned and copied on side streams; features on that device, or
            in host memory that it reads in place, are gathered there without a buffer.
        streams: number of CUDA streams; slot i uses stream i % streams.
        aggregate: function (indptr, indices, features, nodes, out) -> [S, 2F], such as `self_and_mean` of model.py.
            If features are a tensor of floats, or of codes, the outermost hop is then aggregated straight from it,
            not gathered: x is the result for a blocks[0] with global ids in `indices` and only its destinations in
            `src_nodes`.
        dtype: of x; None: that of features. Rows are moved as stored and converted on the device.
        gather: function (features, ids, out, **coded) -> [n, F] for tensors, such as `gather_rows` of model.py. It
            decodes into `out`, as `aggregate` does, if features are `coded`.
        reuse: False allocates new tensors for each batch on CPU, for callers that keep batches.
        edge_features: [M, D], row for row with the graph's `indices`; batches then have the rows of their edges, by edge_ids.

    Attributes:
        features: the rows that are moved: those given, as they are `stored`. source: what they stand for, on the device.
        first_hop: whether x is aggregated. on_device: whether the features are on the device.
        coded, decode: see `Features`, with values on the device.
        buffers: {"rows", "edges" or "rest": buffer of each slot}; rest: blocks and labels.
    """

    def __init__(
        self,
        features,
        labels,
        *,
        slots,
        device="cpu",
        streams=1,
        aggregate=None,
        dtype=None,
        gather=None,
        reuse=True,
        edge_features=None,
    ):
        self.source = ask(features, "over")(stored(features), device)
        features = self.features = stored(features)
        self.coded = ask(self.source, "coded")
        self.decode = ask(self.source, "decode")
        self.labels = labels
        self.edge_features = edge_features
        self.device = torch.device(device)
        self.reuse = reuse
        self.copies = CudaCopies(self.device, streams) if self.device.type == "cuda" else None
        self.on_device = self._has(features)
        self.gather = gather or take
        self.aggregate = aggregate
        self.first_hop = aggregate is not None and isinstance(features, torch.Tensor)
        self.first_hop &= features.dtype.is_floating_point or bool(self.coded)
        self.width = features.shape[1] * (2 if self.first_hop else 1)
        self.convert = dtype
        self.dtype = dtype or self.source.dtype
        self.buffers = {name: [None] * slots for name in ("rows", "edges", "rest")}
        self.copied = [None] * slots  # event: copies out of the slot are done
        self.began = [None] * slots  # event: the copy of x began

    def counts(self):
        """Return the counts of the features, see `Features`."""
        return ask(self.features, "counts")()

    def stream(self, slot, blocks=()):
        """Context with the slot's stream as current CUDA stream: sample on the GPU in it, to overlap with training."""
        return self.copies.stream(slot, blocks) if self.copies else nullcontext()

    def fetch(self, slot, blocks, batch=None):
        """Fetch the features of blocks[0].src_nodes and the labels of the seeds -> `Batch`, on the ring's device.

        Args:
            slot: index of the buffers to fill. No batch in use may hold it; `prefetch` takes care of that.
            blocks: the sampled blocks, outermost hop first.
            batch: the Batch to complete: its y, if it has one, is brought in place of the labels; its other fields are kept.

        Raises:
            ValueError: for a slot the ring does not have, or, with edge_features, blocks without edge_ids.
        """
        if slot >= len(self.copied):
            raise ValueError(
                f"slot {slot} of a ring with slots={len(self.copied)}: "
                f"prefetch(depth=d) needs slots=d + 1, here {slot + 1} or more"
            )
        batch = batch or Batch()
        with self.stream(slot, blocks):
            try:
                edges = self._edges(slot, blocks)
                y = batch.y
                if y is None:
                    seeds = blocks[-1].src_nodes[: blocks[-1].num_dst]
                    y = self.labels.index_select(0, seeds.to(self.labels.device))
                moved, y = self._move(slot, blocks, y) if self.copies else (blocks, y)
                outer = (moved if self.on_device else blocks)[0]
                nodes = outer.src_nodes
                if self.features.shape[0] < self.labels.shape[0]:
                    nodes = nodes[nodes < self.features.shape[0]]
                x = self._bring(
                    slot, "rows", self.features, nodes, outer if self.first_hop else None
                )
            finally:  # also if something fails after a copy has started
                self.copied[slot] = self.copies and self.copies.event()
        return batch._replace(
            blocks=moved, x=x, y=y, began=self.began[slot], ready=self.copied[slot], edges=edges
        )

    def _move(self, slot, blocks, y):
        """Move blocks and labels to the device -> (blocks, y). Host tensors go through one pinned buffer, in one copy.

        If the outermost hop is aggregated on the host its edges stay there: the GPU never reads them.
        """
        if self.first_hop and not self.on_device:
            blocks = [blocks[0]._replace(indices=blocks[0].indices[:0]), *blocks[1:]]
        fields = [t for block in blocks for t in block] + [y]
        sent = [i for i, t in enumerate(fields) if t is not None and not t.is_cuda]
        sizes = [-(-fields[i].nbytes // 16) * 16 for i in sent]
        if any(sizes):
            like = lambda part, t: part[: t.nbytes].view(t.dtype).view(t.shape)  # noqa: E731
            memory = self._buffer(slot, "rest", (sum(sizes),), torch.uint8)
            for i, part in zip(sent, memory.split(sizes)):
                like(part, fields[i]).copy_(fields[i])
            for i, part in zip(sent, self.copies.copy(memory).split(sizes)):
                fields[i] = like(part, fields[i])
        values = iter(fields)
        return [type(block)(*islice(values, len(block))) for block in blocks], next(values)

    def _edges(self, slot, blocks):
        """Fetch the edge features of each block -> tuple of [E, D], empty if the ring has none."""
        if self.edge_features is None:
            return ()
        if any(block.edge_ids is None for block in blocks):
            raise ValueError("features of edges need NeighborSampler(edge_ids=True)")
        ids = torch.cat([block.edge_ids for block in blocks])
        rows = self._bring(slot, "edges", self.edge_features, ids)
        return rows.split([block.num_edges for block in blocks])

    def _has(self, table):  # whether its rows are a CUDA tensor, in GPU memory or read in place
        return getattr(table, "device", torch.device("cpu")).type == self.device.type != "cpu"

    def _bring(self, slot, name, table, ids, block=None):
        """Fetch rows ids [n] of a table, or aggregate a block -> [n, F] on the device, as `dtype` or the table's."""
        if self._has(table):
            rows = self._read(table, ids.to(self.device, non_blocking=True), block)
        elif self.copies and ask(table, "kept_on") == self.device.type:
            upload = lambda missing: self._fill(slot, name, table.features, missing)  # noqa: E731
            rows = table.gather(ids, missing=upload)
        else:
            rows = self._fill(slot, name, table, ids, block)
        if name == "rows":
            rows = self.decode(rows, ids)
        return rows.to(self.convert or rows.dtype)

    def _fill(self, slot, name, table, ids, block=None):
        """Read rows into the slot's buffer -> [n, F]: a view of the buffer or, with a GPU, the copy there. On CPU with
        reuse=False: a new tensor."""
        if not self.copies and not self.reuse:
            return self._read(table, ids, block)
        shape = ids.numel(), self.width if block else table.shape[1]
        made = block or self._decodes(table)
        buffer = self._buffer(slot, name, shape, self.dtype if made else table.dtype)
        rows = self._read(table, ids.cpu(), block and block.to("cpu"), buffer)
        if not self.copies:
            return rows
        if name == "rows":
            self.began[slot] = self.copies.event()
        return self.copies.copy(rows)

    def _buffer(self, slot, name, shape, dtype):
        """Return the slot's buffer `name` as a tensor of this shape and dtype, free to be overwritten."""
        if self.copied[slot] is not None:
            # wait for the last copies out of this pinned buffer; on CPU only `prefetch` guards a slot
            self.copied[slot].synchronize()
        size = math.prod(shape) * dtype.itemsize
        kept = self.buffers[name]
        if kept[slot] is None or kept[slot].numel() < size:
            kept[slot] = None  # free its memory before more is allocated
            total = 1 << (size - 1).bit_length() if size else 0
            kept[slot] = torch.empty(
                total, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda"
            )
        return kept[slot][:size].view(dtype).view(shape)

    def _read(self, table, ids, block, out=None):
        gather = self.gather if isinstance(table, torch.Tensor) else take
        coded = self.coded if block or self._decodes(table) else {}
        # sums are float32, rounded once at the end
        if out is None and (coded or block and self.dtype != table.dtype):
            out = torch.empty(len(ids), self.width, dtype=self.dtype, device=table.device)
        if block is None:
            return gather(table, ids, out, **coded)
        return self.aggregate(block.indptr, block.indices, table, ids, out, **coded)

    def _decodes(self, table):  # whether rows gathered from it are decoded on the way
        return (
            table is self.features
            and isinstance(table, torch.Tensor)
            and (self.on_device or not self.copies)
            and self.coded
            and self.gather is not take
        )


class Features:
    """What the ring, the loader and placement `ask` of features, and the answers of those that do not say, as a tensor.

    Attributes:
        collective: whether all processes gather together: equally often, in the same order.
        looking_ahead: context manager of an iterator over sampled batches, inside which they are fetched, on one thread; or
            None: batches are sampled and fetched together.
        kept_on: type of the device of a cache, whose `gather` takes a function that uploads what is missing; or None.
        paged: whether they have `MmapFeatures.reader`, and so pages that can be planned.
        coded: arguments with which `gather` and `aggregate` of a ring decode rows as they read them.
    """

    collective = False
    looking_ahead = None
    kept_on = None
    paged = False
    coded = {}
    # () -> {name: number} of what was read since the start
    counts = dict
    # (rows, ids) -> what rows ids [n] of those `stored` stand for
    decode = staticmethod(lambda rows, ids: rows)
    # (rows, device=None) -> what other rows in place of those `stored` stand for; device: where they are decoded
    over = staticmethod(lambda rows, device=None: rows)
    # (bytes, share=1): leave memory to others, and expect to read a share of the rows
    reserve = staticmethod(lambda count, share=1: None)
    # (features) -> features made of these, for processes that gather unequally often
    uneven = staticmethod(lambda features: getattr(features, "tensor", features))
    # of uneven features: (collective) -> one in which processes that wait answer the others; (): answer them to the end
    answering = staticmethod(lambda collective: collective)
    finish = staticmethod(lambda: None)


def ask(features, what):
    """Return what features say: an attribute of `Features`."""
    return getattr(features, what, getattr(Features, what))


def stored(features):
    """Return the rows that features are kept as, which `FeatureRing` moves; most are kept as they are."""
    return getattr(features, "stored", features)


def take(features, ids, out=None):
    """Rows ids [n] of features -> [n, F]."""
    if isinstance(features, torch.Tensor):
        return torch.index_select(features, 0, ids, out=out)
    return features.gather(ids, out=out)


def prefetch(make, items, *, depth=2, threads=1, finish=False):
    """Run make(item, slot) on threads, ahead of the caller, and yield the results in the order of the items.

    Beside the result the caller holds, at most `depth` are pending or ready; results that exist at the same time have
    different slots, 0 .. depth. An exception in `make` is raised when that item's turn comes. Closing the generator (or
    leaving the process) cancels calls that have not started, unless they are to `finish`, and waits for the others.

    Args:
        make: callable (item, slot) -> result. items: iterable. threads: number of worker threads.
        depth: results prepared ahead; with 0 each is made on the caller's thread when it is asked for.
    """
    jobs = ((item, i % (depth + 1)) for i, item in enumerate(items))
    if depth == 0:
        yield from (make(*job) for job in jobs)
        return
    pending = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
    try:
        pending.extend(pool.submit(make, *job) for job in islice(jobs, depth))
        while pending:
            result = pending.popleft().result()
            pending.extend(pool.submit(make, *job) for job in islice(jobs, 1))
            yield result  # its slot is refilled when the next result is asked for
    finally:
        pool.shutdown(cancel_futures=not finish)


# ---- placement


def place(indptr, indices, labels, features, mode, *, device="cpu", more=(), spare=0):
    """Place a graph and its features as a mode says -> (indptr, indices, labels, features, *more).

    Args:
        indptr: int64 [V+1], indices: [M], labels: int64 [V], host tensors. features: in host memory, or for "cuda-cuda" on
            the GPU already.
        mode: one of MODES. "cuda-cuda": copied to GPU memory. "pinned-cuda": host memory that the GPU reads in place;
            pass what `share` returned. "cpu-cuda" and "cpu-cpu": unchanged; rows go through the ring.
        device: the GPU of the first two modes. more: further host tensors, such as edge times.
        spare: bytes of GPU memory that "pinned-cuda" may use to copy indptr and, if they suffice, indices too: sampling
            reads these at random.

    Raises:
        ValueError: for an unknown mode, or host memory that `share` did not allocate. RuntimeError: if CUDA refuses.
    """
    arrays = [indptr, indices, labels, getattr(features, "tensor", features), *more]
    if mode == "cuda-cuda":
        return tuple(
            a
            if getattr(a, "is_cuda", False)
            else copy_rows(a, torch.empty(a.shape, dtype=a.dtype, device=device))
            for a in arrays
        )
    if mode == "pinned-cuda":
        return extra(".pinned", mode).views(arrays, device, spare)
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown: choose one of {', '.join(MODES)}")
    return tuple(arrays)


def copy_rows(source, target, ids=None):
    """Copy all rows of source, or rows ids, into target, a chunk at a time -> target."""
    step = rows_of_a_chunk(source)
    for a in range(0, len(target), step):
        b = min(a + step, len(target))
        if ids is None and isinstance(source, torch.Tensor):
            target[a:b] = source[a:b]
        else:
            rows = torch.arange(a, b, device="cpu") if ids is None else ids[a:b]
            target[a:b] = take(source, rows)
    return target


def rows_of_a_chunk(array):
    """Return how many rows of an array to copy at a time."""
    return max(1, CHUNK_BYTES // max(1, math.prod(array.shape[1:]) * array.dtype.itemsize))
