"""Feature rows on their way to the training step: a ring of reused buffers, placement, a cache of hot rows.

This file stands alone: copy it into your own code.

    indptr, indices, labels, features = place(indptr, indices, labels, features, "cpu-cuda", "cuda")
    ring = FeatureRing(features, labels, slots=depth + 1, device="cuda")
    def load(seeds, slot):
        with ring.stream(slot):
            return ring.fetch(slot, sampler.sample(seeds, step))
    for batch in prefetch(load, batches, depth=depth):
        batch.wait()
        model(batch.blocks, batch.x)

Why a ring: a fresh tensor of a hundred megabytes costs more in page faults than the gather that fills it, and a GPU can
only compute while it is sent page-locked memory. So a few buffers are allocated once and used in turn. `prefetch` gives
every batch a slot of the ring. A slot is used again once the caller has asked for the batch after the one in it and, on
CUDA, the copy out of it has finished.

Letters: V nodes and M edges of the graph; S seeds, N input nodes of a batch; F feature width; k fanout; L layers.
"Features" are a tensor [V, F] or any object with .shape, .dtype and .gather(ids, out=None), such as an open store's.
"""

import logging
import mmap
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import accumulate, islice
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

MODES = ("cuda-cuda", "pinned-cuda", "cpu-cuda", "cpu-cpu")  # where graph and features live - where training runs
CHUNK_BYTES = 1 << 24  # rows copied at a time from a store
CHUNK_EDGES = 1 << 22  # edges handled at a time
PIECE_BYTES = 1 << 30  # host memory registered at a time


# ---------------------------------------------------------------------------------------------------------------------
# the ring


class Fetched(NamedTuple):
    """What the ring brings for a batch, on the training device. On CPU `x` is overwritten when the next batch is taken
    from `prefetch`, unless the ring has reuse=False."""

    blocks: list  # L blocks, outermost hop first
    x: torch.Tensor  # [N, F] features of blocks[0].src_nodes; [S, 2F] where the ring aggregates the first hop
    y: torch.Tensor  # [S] labels of the seeds
    ready: Any = None  # CUDA event: the tensors have arrived; None on CPU
    began: Any = None  # CUDA event: the copy of x to the GPU began; None where nothing is copied
    edges: tuple = ()  # for each block the features [E, D] of its edges, where the ring has them

    def wait(self):
        """Make the current CUDA stream wait for the copies, and keep their memory until that stream has used them."""
        if self.ready is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.ready)
            for tensors in (self.x, self.y, *self.edges, *self.blocks):
                tensors.record_stream(stream)
        return self


class CudaCopies:
    """What the ring needs of a GPU: page-locked buffers, streams to copy on, events. Tests simulate it."""

    def __init__(self, device, streams):
        self.device = torch.device(device)
        self.streams = [torch.cuda.Stream(self.device) for _ in range(streams)]
        for stream in self.streams:  # features and caches were put on the device by the stream that is current here
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def buffer(self, shape, dtype):
        """A page-locked tensor."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    @contextmanager
    def stream(self, slot, blocks=()):
        """Run the body on the slot's stream, behind what the caller's stream is doing to blocks on the GPU."""
        caller, side = torch.cuda.current_stream(self.device), self.streams[slot % len(self.streams)]
        if caller == side and torch.cuda.current_device() == side.device_index:  # within such a context already
            yield
            return
        if any(block.src_nodes.is_cuda for block in blocks):
            side.wait_stream(caller)
            for block in blocks:
                block.record_stream(side)
        with torch.cuda.device(self.device):  # a thread begins on GPU 0, whatever the rank, and opens no context there
            torch.cuda.set_stream(side)
            try:
                yield
            finally:
                torch.cuda.set_stream(caller)

    def copy(self, tensor):
        """Start a copy to the GPU on the current stream -> the tensor it will arrive in."""
        return tensor.to(self.device, non_blocking=True)

    def event(self):
        """A timed event behind all work of the current stream so far; .synchronize() waits for it on the host."""
        return torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))


class FeatureRing:
    """Gather the features and labels of a batch into reused buffers and bring them to the training device.

    A buffer takes a power of two of bytes: page-locked memory is rounded up to one anyway, and on CPU pages that are
    never written take no memory. A batch that needs more gets the next power, and a log line says so; all buffers
    together never exceed slots * V rows, rounded up. Gathers run on torch's own threads, several at once when
    `prefetch` has several threads.

    Args:
        features: features of any dtype, in host memory or on the device.
        labels: int64 [V].
        slots: number of buffers: depth + 1 of `prefetch`, for the batches prepared ahead and the one in use.
        device: where training runs. On CUDA the buffers are page-locked and copied on streams of their own; features
            that are on that device already (or that it reads in place) are gathered there, without a buffer.
        streams: CUDA streams; slot i uses stream i % streams.
        log: function of one string, called when buffers grow.
        aggregate: function (indptr, indices, features, nodes, out) -> [S, 2F], such as `self_and_mean` of model.py.
            With it the outermost hop is aggregated straight from a feature tensor of floats, not gathered: x is
            what it returns for a blocks[0] with global ids in `indices` and its destinations as `src_nodes`.
        dtype: of x; the features' own when None. Rows travel as they are stored and are converted on the device.
        gather: function (features, ids, out) -> [n, F] for features that are a tensor, such as `gather_rows` of
            model.py; torch.index_select when None.
        reuse: False gives every batch on CPU a tensor of its own, for callers who keep batches.
        copies: what stands for the GPU in a test.
        edge_features: [M, D], a row for each of the graph's edges, where batches are to bring those of their edges:
            blocks then need edge_ids. They go through a ring of their own, of the same slots.

    Attributes:
        first_hop: True when x is aggregated: `aggregate` is given and the features are a tensor of floats.
    """

    def __init__(self, features, labels, *, slots, device="cpu", streams=1, log=None, aggregate=None, dtype=None,
                 gather=None, reuse=True, copies=None, edge_features=None):  # fmt: skip
        self.features, self.labels, self.device, self.reuse = features, labels, torch.device(device), reuse
        self.copies = copies or (CudaCopies(self.device, streams) if self.device.type == "cuda" else None)
        home = getattr(features, "device", torch.device("cpu")).type
        self.on_device = home == self.device.type != "cpu"
        self.cached = isinstance(features, CachedFeatures) and features.cache.device.type == self.device.type
        self.gather = gather if gather and isinstance(features, torch.Tensor) else take
        self.aggregate = aggregate
        self.first_hop = aggregate is not None and isinstance(features, torch.Tensor) and features.is_floating_point()
        self.width = features.shape[1] * (2 if self.first_hop else 1)
        self.dtype = dtype or features.dtype
        self.stored = self.dtype if self.first_hop else features.dtype  # of the buffers
        self.log = log or logging.getLogger(__name__).info
        self.buffers = [None] * slots
        self.packed = [None] * slots  # what else a batch brings from host memory, in bytes
        self.copied = [None] * slots  # event: the copy out of the slot is done
        self.began = [None] * slots  # event: it began
        self.rows, self.lock = 0, threading.Lock()  # rows of the next buffer to be allocated
        self.edge_ring = (
            None
            if edge_features is None
            else FeatureRing(
                edge_features,
                None,
                slots=slots,
                device=device,
                log=log,
                dtype=dtype,
                gather=gather,
                reuse=reuse,
                copies=self.copies,
            )
        )

    def stream(self, slot):
        """A context: CUDA work on the slot's stream. Sample on the GPU inside it, so that it overlaps with training."""
        return self.copies.stream(slot) if self.copies else nullcontext()

    def fetch(self, slot, blocks):
        """Fetch what the blocks need.

        Args:
            slot: which buffer to fill. No batch that is still in use may lie in it; `prefetch` sees to that.
            blocks: the sampled blocks; features are fetched for blocks[0].src_nodes, labels for the last one's seeds.

        Returns:
            `Fetched`, on the ring's device.

        Raises:
            ValueError: for a slot that the ring does not have.
        """
        if slot >= len(self.buffers):
            said = f"slot {slot} of a ring with slots={len(self.buffers)}: prefetch(depth=d) uses d + 1 slots"
            raise ValueError(f"{said}, so give the ring slots={slot + 1} or more")
        outer, seeds = blocks[0], blocks[-1].src_nodes[: blocks[-1].num_dst]
        if not self.copies:
            x = self._fetch(slot, outer.src_nodes, outer)
            return Fetched(blocks, x, self.labels.index_select(0, seeds), edges=self._edges(slot, blocks))
        with self.copies.stream(slot, blocks):
            edges = self._edges(slot, blocks)
            blocks, y = self._move(slot, blocks, self.labels.index_select(0, seeds.to(self.labels.device)))
            x = self._fetch(
                slot, (blocks[0] if self.on_device else outer).src_nodes, blocks[0] if self.on_device else outer
            )
            ready = self.copied[slot] = self.copies.event()
            return Fetched(blocks, x, y, ready, self.began[slot], edges)

    def _move(self, slot, blocks, y):
        """Blocks and labels on the device: what lies in host memory goes there in one copy of page-locked memory.

        The edges of a first hop that is aggregated on the host stay there: the GPU never reads them.
        """
        if self.first_hop and not self.on_device:
            blocks = [blocks[0]._replace(indices=blocks[0].indices[:0]), *blocks[1:]]
        fields = [block._asdict() for block in blocks] + [{"y": y}]
        mine = [(values, name) for values in fields for name, t in values.items() if t is not None and not t.is_cuda]
        if not mine:
            return blocks, y
        tensors = [values[name].contiguous() for values, name in mine]
        *starts, size = accumulate((-(-t.nbytes // 16) * 16 for t in tensors), initial=0)
        if size:
            if self.copied[slot] is not None:
                self.copied[slot].synchronize()  # the batch before in this slot has left the buffers
            if self.packed[slot] is None or len(self.packed[slot]) < size:
                self.packed[slot] = self.copies.buffer((1 << (size - 1).bit_length(),), torch.uint8)
            part = lambda memory, t, a: memory[a : a + t.nbytes].view(t.dtype).view(t.shape)  # noqa: E731
            for t, a in zip(tensors, starts):
                part(self.packed[slot], t, a).copy_(t)
            there = self.copies.copy(self.packed[slot][:size])
            for (values, name), t, a in zip(mine, tensors, starts):
                values[name] = part(there, t, a)
        return [type(block)(**values) for block, values in zip(blocks, fields)], fields[-1]["y"]

    def _edges(self, slot, blocks):
        """For each block the features [E, D] of its edges, where the ring has some."""
        if not self.edge_ring:
            return ()
        if any(block.edge_ids is None for block in blocks):
            raise ValueError(
                "features of edges are asked for, and the blocks have no edge_ids: NeighborSampler(edge_ids=True)"
            )
        rows = self.edge_ring._fetch(slot, torch.cat([block.edge_ids for block in blocks]))
        return rows.split([block.num_edges for block in blocks])

    def _fetch(self, slot, ids, block=None):
        """Rows ids of the features, or what a block makes of them, on the ring's device -> [N, F] of its dtype."""
        if self.on_device:
            rows = self._read(self.features, ids.to(self.device, non_blocking=True), block)
        elif self.cached and self.copies:
            rows = self.features.gather(ids, missing=lambda some: self._upload(slot, self.features.features, some))
        elif self.copies:
            rows = self._upload(slot, self.features, ids, block)
        elif self.reuse:
            rows = self._gather(slot, self.features, ids, block)
        else:
            rows = self._read(self.features, ids, block)
        return rows.to(self.dtype)

    def _upload(self, slot, features, ids, block=None):
        """Send rows to the device through the slot's buffer -> [N, F]; the event `copied` releases the buffer."""
        rows = self._gather(slot, features, ids.cpu(), block.to("cpu") if self.first_hop else None)
        self.began[slot] = self.copies.event()
        x = self.copies.copy(rows)
        self.copied[slot] = self.copies.event()
        return x

    def _gather(self, slot, features, ids, block=None):
        """Read rows into the slot's buffer -> [N, F], a view of it."""
        if self.copied[slot] is not None:
            self.copied[slot].synchronize()  # back-pressure: the previous copy out of this slot
        n = ids.numel()
        if self.buffers[slot] is None or self.buffers[slot].shape[0] < n:
            self.buffers[slot] = None  # free its memory before more is allocated
            with self.lock:
                if n > self.rows:
                    row = self.width * self.stored.itemsize
                    self.rows = max(n, (1 << (n * row - 1).bit_length()) // row)
                    self.log(f"ring: a batch of {n:,} rows takes buffers of {self.rows:,} rows, "
                             f"{self.rows * row:,} bytes each; there are {len(self.buffers)}")  # fmt: skip
            empty = self.copies.buffer if self.copies else lambda shape, dtype: torch.empty(shape, dtype=dtype)
            self.buffers[slot] = empty((self.rows, self.width), self.stored)
        return self._read(features, ids, block, self.buffers[slot][:n])

    def _read(self, features, ids, block, out=None):
        if self.first_hop:
            if out is None and self.stored != features.dtype:  # sums are float32 within, rounded once
                out = torch.empty(len(ids), self.width, dtype=self.stored, device=features.device)
            return self.aggregate(block.indptr, block.indices, features, ids, out)
        return self.gather(features, ids, out)


def take(features, ids, out=None):
    """Rows ids [n] of features -> [n, F], `out` where that is given."""
    if isinstance(features, torch.Tensor):
        return torch.index_select(features, 0, ids, out=out)
    return features.gather(ids, out=out)


def prefetch(make, items, *, depth=2, threads=1):
    """Run make(item, slot) on threads, ahead of the caller, and yield the results in the order of the items.

    The results are the same for every depth and number of threads. At most `depth` results are being made or waiting
    beside the one the caller holds, and results that exist at the same time have different slots. An exception in
    `make` reaches the caller, with the worker's traceback, when its turn comes. Closing the generator (or leaving the
    process) cancels what has not started and waits for what has.

    Args:
        make: callable (item, slot) -> result; slot is an int in 0 .. depth.
        items: iterable.
        depth: results to prepare ahead; with 0 each is made on the caller's thread when it is asked for.
        threads: worker threads.
    """
    jobs = ((item, i % (depth + 1)) for i, item in enumerate(items))
    if depth == 0:
        yield from (make(*job) for job in jobs)
        return
    pending = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="prefetch") as pool:
        try:
            pending.extend(pool.submit(make, *job) for job in islice(jobs, depth))
            while pending:
                result = pending.popleft().result()
                pending.extend(pool.submit(make, *job) for job in islice(jobs, 1))
                yield result
        finally:
            for future in pending:
                future.cancel()


# ---------------------------------------------------------------------------------------------------------------------
# placement


def place(indptr, indices, labels, features, mode, device="cpu", more=(), spare=0):
    """Put a graph and its features where a mode keeps them.

    Args:
        indptr: int64 [V+1], indices: [M], labels: int64 [V], host tensors.
        features: features in host memory.
        mode: one of MODES. "cuda-cuda": all in GPU memory. "pinned-cuda": all in host memory that the GPU reads in
            place, but for indptr and indices where `spare` says so; pass what `share` returned. "cpu-cuda" and
            "cpu-cpu": all stays; rows go through the ring.
        device: the GPU of the first two.
        more: further host tensors, such as times of the edges.
        spare: bytes of GPU memory that "pinned-cuda" may take for indptr and, if that leaves enough, indices: sampling
            reads them at random places.

    Returns:
        (indptr, indices, labels, features, *more): for the first two modes tensors on the device.

    Raises:
        ValueError: for an unknown mode, or host memory that `share` did not allocate.
        RuntimeError: when CUDA refuses; it names the call.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown: choose one of {', '.join(MODES)}")
    arrays = [indptr, indices, labels, getattr(features, "tensor", features), *more]
    if mode == "cuda-cuda":
        return tuple(_copy_rows(a, torch.empty(a.shape, dtype=a.dtype, device=device)) for a in arrays)
    if mode == "pinned-cuda":
        copied = indptr.nbytes <= spare, indptr.nbytes + indices.nbytes <= spare
        graph = (a.to(device) if near else gpu_view(a, device) for a, near in zip(arrays, copied))
        return *graph, *(gpu_view(a, device) for a in arrays[2:])
    return tuple(arrays)


def _copy_rows(source, target):
    """Copy a tensor or features to a tensor of the same shape, a piece at a time -> target."""
    step = _rows_of_a_chunk(source)
    for a in range(0, source.shape[0], step):
        b = min(a + step, source.shape[0])
        target[a:b] = source[a:b] if isinstance(source, torch.Tensor) else source.gather(torch.arange(a, b))
    return target


def _rows_of_a_chunk(array):
    return max(1, CHUNK_BYTES // max(1, torch.Size(array.shape[1:]).numel() * array.dtype.itemsize))


def share(arrays, *, leads=True, total=None):
    """Copy arrays into host memory that all processes of this machine share: one copy, made by one of them.

    It is shared memory without a name (memfd): the kernel frees it when the last process that maps it has ended, in
    whatever way, and the small /dev/shm of a container is no limit. Linux only.

    Args:
        arrays: list of host tensors, or features; the same shapes and dtypes in every process.
        leads: True in the one process that makes the copy.
        total: with several processes, a function that sums numbers over the processes of this machine and returns
            the sums to each (an all-reduce; `Ranks.sum` of ddp.py on one machine). Every process calls it twice.

    Returns:
        List of tensors in shared memory; what one process writes into them, all see.

    Raises:
        OSError: when the memory cannot be mapped, or the leading process belongs to another user.
    """
    arrays = [getattr(a, "tensor", a) for a in arrays]
    sizes = [a.dtype.itemsize * torch.Size(a.shape).numel() for a in arrays]
    *offsets, end = accumulate((-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes), initial=0)
    handle = 0
    if leads:
        handle = os.memfd_create("ringblock")
        os.ftruncate(handle, max(end, 1))
        memory = mmap.mmap(handle, 0)
        for array, offset in zip(arrays, offsets):
            _copy_rows(array, _view(memory, array, offset))
    if total:
        leader, number = (int(n) for n in total(os.getpid() if leads else 0, handle))
        if not leads:
            handle = os.open(f"/proc/{leader}/fd/{number}", os.O_RDWR)
            memory = mmap.mmap(handle, 0)
        total(0)  # the leader keeps its handle open until everyone has opened it
    os.close(handle)
    return [_view(memory, a, offset) for a, offset in zip(arrays, offsets)]


def _view(memory, like, offset):
    """A tensor over mapped memory, of the shape and dtype of another."""
    if 0 in like.shape:
        return torch.empty(like.shape, dtype=like.dtype)
    count = torch.Size(like.shape).numel()
    return torch.frombuffer(memory, dtype=like.dtype, count=count, offset=offset).view(like.shape)


def gpu_view(host, device, cudart=None):
    """Let a GPU read host memory in place (UVA), without a copy.

    Args:
        host: tensor from `share`: its memory starts on a page and has its last page to itself.
        device: the GPU.
        cudart: what stands for torch.cuda.cudart() in a test.

    Returns:
        CUDA tensor over the same memory, which it keeps alive.

    Raises:
        ValueError: for memory that does not start on a page.
        RuntimeError: when CUDA refuses to register or to address the memory; nothing stays registered.
    """
    if not host.numel():
        return host.to(device)
    cudart, registered = cudart or torch.cuda.cudart(), []
    with torch.cuda.device(device):  # the current device owns the registration
        for start, size in page_pieces(host.data_ptr(), host.numel() * host.element_size()):
            code = int(cudart.cudaHostRegister(start, size, 2))  # 2: mapped into the GPU's address space
            if code:
                for start_before in registered:
                    cudart.cudaHostUnregister(start_before)
                raise RuntimeError(f"cudaHostRegister of {size:,} bytes at {start:#x} failed with CUDA error {code} "
                                   f"({cudart.cudaGetErrorString(cudart.cudaError(code))}); --mode cpu-cuda works "
                                   "without it")  # fmt: skip
            registered.append(start)
        view = torch.as_tensor(_host_array(host), device=device).view(host.dtype)
    if view.data_ptr() != host.data_ptr():
        raise RuntimeError("this GPU does not address host memory in place (its pointers differ); use --mode cpu-cuda")
    return view


def page_pieces(pointer, nbytes, piece=PIECE_BYTES):
    """Cut memory into pieces of whole pages -> [(start, size in bytes)]; one call cannot register very large memory."""
    if pointer % mmap.PAGESIZE:
        raise ValueError(f"host memory at {pointer:#x} does not start on a page: copy it with share() first")
    end = pointer + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return [(start, min(piece, end - start)) for start in range(pointer, end, piece)]


def _host_array(host):
    """An object that torch.as_tensor takes for a CUDA array; bfloat16, which numpy lacks, is declared as int16."""
    array = (host.view(torch.int16) if host.dtype == torch.bfloat16 else host).numpy()
    data = (host.data_ptr(), False)  # False: torch refuses read-only memory
    interface = {"shape": array.shape, "typestr": array.dtype.str, "data": data, "version": 3}
    return SimpleNamespace(__cuda_array_interface__=interface, host=host)  # kept by the view, and so the memory


# ---------------------------------------------------------------------------------------------------------------------
# the cache


def expected_visits(indptr, indices, train_nodes, fanouts, batch_size=1024):
    """How likely each node is to be among the input nodes of a batch: the order in which a cache should keep rows.

    The vertex-inclusion recursion of SALIENT++ (arXiv 2305.03152), for blocks in which every hop expands all nodes of
    the batch so far, with fresh draws. Neighbours are taken as independent. L passes over the edges.

    Args:
        indptr: int64 [V+1], indices: [M], the graph.
        train_nodes: [T] node ids that batches are drawn from.
        fanouts: L numbers from the seeds outward, -1 for all neighbours.
        batch_size: seeds of a batch.

    Raises:
        IndexError: where the graph is damaged: a list or an edge leaves it.

    Returns:
        float32 [V], probabilities. Without training nodes the degree indptr.diff() orders rows nearly as well.
    """
    num_nodes, num_edges, device = indptr.numel() - 1, indices.numel(), indptr.device
    degree = indptr.diff()
    if bool((degree < 0).any()) or int(indptr[0]) != 0 or int(indptr[-1]) != num_edges:
        raise IndexError("the graph is damaged: a list in indptr leaves indices or runs backwards")
    degree, train_nodes = degree.float(), train_nodes.to(device)  # five numbers a node from here on: V may be large
    seed = min(1.0, batch_size / max(1, train_nodes.numel()))
    held, picked = torch.zeros(2, num_nodes, device=device)  # chances: to be in the batch; to draw a given neighbour
    held[train_nodes] = seed
    for k in fanouts:
        log_unpicked = held.sub_(picked)
        picked.add_(log_unpicked.mul_((k / degree).clamp_(max=1)) if k >= 0 else log_unpicked).clamp_(0, 1)
        torch.neg(picked, out=log_unpicked).log1p_()
        total = torch.zeros_like(picked)
        for a in range(0, num_edges, CHUNK_EDGES):
            b = min(a + CHUNK_EDGES, num_edges)
            first, last = torch.searchsorted(indptr, torch.tensor([a + 1, b], device=device)).tolist()
            counts = indptr[first - 1 : last + 1].clamp(a, b).diff()
            values = log_unpicked[first - 1 : last].repeat_interleave(counts, output_size=b - a)
            low, high = (int(node) for node in indices[a:b].aminmax())
            if low < 0 or high >= num_nodes:
                bad = low if low < 0 else high
                raise IndexError(f"the graph is damaged: indices holds {bad}, and its nodes are 0 to {num_nodes - 1}")
            total.index_add_(0, indices[a:b], values)
        held = total.exp_()
        held[train_nodes] *= 1 - seed
        held.neg_().add_(1)
    return held


class CachedFeatures:
    """Features whose hottest rows are kept nearer: on a GPU before host memory, in RAM before a store on disk.

    Args:
        features: the features behind the cache.
        visits: [V], the larger the hotter: `expected_visits`, or the degree.
        budget: bytes of rows to keep. A map from node to cached row takes another 4 bytes a node.
        device: where to keep them.

    Attributes:
        cache: [rows, F] on the device. shape, dtype: of the features. device: where `gather` looks ids up.
        hits, lookups: rows found in the cache and rows asked for since the start.
    """

    def __init__(self, features, visits, budget, device="cpu"):
        self.features = features = getattr(features, "tensor", features)
        self.shape, self.dtype = tuple(features.shape), features.dtype
        self.device = getattr(features, "device", torch.device("cpu"))
        num_nodes, width = self.shape
        rows = min(num_nodes, int(budget) // (width * self.dtype.itemsize))
        self.piece = _rows_of_a_chunk(features)  # small: a large temporary costs more in page faults than in work
        hot = visits.to(self.device).topk(rows).indices.sort().values  # in order: read from the disk in one direction
        self.position = torch.full((num_nodes,), -1, dtype=torch.int32, device=self.device)
        self.position[hot] = torch.arange(rows, dtype=torch.int32, device=self.device)
        self.cache = torch.empty(rows, width, dtype=self.dtype, device=device)
        for a in range(0, rows, self.piece):
            self.cache[a : a + self.piece] = take(features, hot[a : a + self.piece])
        self.hits = self.lookups = 0
        self.lock = threading.Lock()

    @property
    def hit_rate(self):
        """Share of the rows asked for that were in the cache; 0 before the first gather."""
        return self.hits / max(1, self.lookups)

    def gather(self, ids, out=None, missing=None):
        """Copy rows: hits from the cache, the others from the features behind it.

        Args:
            ids: int32 or int64 [n] node ids, repeats allowed.
            out: [n, F] on the cache's device; a tensor is made when None.
            missing: function of ids [m] -> their rows [m, F] on the cache's device; reads the features when None.

        Returns:
            [n, F] on the cache's device.
        """
        where = self.cache.device
        ids = ids.to(self.device)
        position = self.position.index_select(0, ids)
        misses = (position < 0).nonzero().squeeze(1)
        with self.lock:
            self.hits, self.lookups = self.hits + ids.numel() - misses.numel(), self.lookups + ids.numel()
        out = torch.empty(ids.numel(), self.shape[1], dtype=self.dtype, device=where) if out is None else out
        if len(self.cache):  # a miss reads row 0, which is overwritten: cheaper than to pick the hits out
            torch.index_select(self.cache, 0, position.clamp_(min=0).to(where, non_blocking=True), out=out)
        for some in [misses] if missing else misses.split(self.piece):
            rows = missing(ids[some]) if missing else take(self.features, ids[some]).to(where)
            out.index_copy_(0, some.to(where, non_blocking=True), rows)
        return out
