"""Neighbour sampling fused with block construction: seeds + CSC graph -> one `Block` a hop.

This file stands alone: copy it into your own code.

    sampler = NeighborSampler(indptr, indices, fanouts=[15, 10, 5], seed=0)
    blocks = sampler.sample(seeds, step=0)     # blocks[0] outermost hop ... blocks[-1] has the seeds as dst
    x = features[blocks[0].src_nodes]          # input rows; then feed blocks[0], blocks[1], ... to the layers

Letters: V nodes and M edges of the graph; S seeds (destinations) of a block, N its sources, E its edges; k fanout.
The graph is CSC over in-edges: the in-neighbours of v are indices[indptr[v]:indptr[v+1]].

What is drawn is a function of (seed, step, hop, node) alone, through a counter-based generator (splitmix64 as a
hash; "the law" below). So results do not depend on threads, ranks, prefetch depth or device, every backend that
follows the law returns the same bits, and any step of a run can be drawn again.
"""

import atexit
import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from torch import Tensor


class Block(NamedTuple):
    """One bipartite hop, destination-major (CSC): messages go from `src_nodes` to the first S of them.

    Integers have the dtype of the graph's `indices` (int32 below 2^31 nodes), `edge_ids` are int64.
    """

    indptr: Tensor  # [S+1] edges of destination s are indices[indptr[s]:indptr[s+1]]
    indices: Tensor  # [E] positions in src_nodes
    src_nodes: Tensor  # [N] global node ids; the first S are the seeds, in the order given
    edge_ids: Optional[Tensor] = None  # [E] position of each edge in the graph's `indices`, when asked for

    @property
    def num_src(self):
        """N, the number of source nodes."""
        return self.src_nodes.numel()

    @property
    def num_dst(self):
        """S, the number of destination nodes."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self):
        """E, the number of edges."""
        return self.indices.numel()

    def to(self, device, non_blocking=False):
        """Return the block with its tensors on `device`."""
        return Block(*(t if t is None else t.to(device, non_blocking=non_blocking) for t in self))

    def record_stream(self, stream):
        """Tell the CUDA allocator that `stream` uses these tensors, so that their memory is not reused too early."""
        for t in self:
            if t is not None and t.is_cuda:
                t.record_stream(stream)

    def to_dgl(self):
        """Return the same block as a DGL block, with dgl.NID (and dgl.EID when edge_ids are there) set."""
        dgl = import_dgl()
        # numbers for the edges: without them DGL's gradients of edge values (GATv2Conv) fail
        ids = torch.arange(self.num_edges, dtype=self.indices.dtype, device=self.indices.device)
        block = dgl.create_block(
            ("csc", (self.indptr, self.indices, ids)), num_src_nodes=self.num_src, num_dst_nodes=self.num_dst
        )
        block.srcdata[dgl.NID], block.dstdata[dgl.NID] = self.src_nodes, self.src_nodes[: self.num_dst]
        if self.edge_ids is not None:
            block.edata[dgl.EID] = self.edge_ids
        return block

    def to_pyg(self):
        """Return PyG's (edge_index [2, E] int64, e_id [E] or None, size (N, S)): conv((x, x[:S]), edge_index)."""
        degree = self.indptr.diff().long()
        dst = torch.repeat_interleave(torch.arange(self.num_dst, device=degree.device), degree)
        return torch.stack([self.indices.long(), dst]), self.edge_ids, (self.num_src, self.num_dst)


def _stub_attribute(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def import_dgl():
    """Import DGL 2.1 also under a torch it was not built for.

    Its PyPI build fails on three parts not needed here: dgl.distributed (which pulls in GraphBolt, torchdata and
    setuptools.extern), dgl.data.movielens (pandas). They are replaced by stubs, only when the plain import fails.
    """
    try:
        import dgl
    except Exception as first:
        if isinstance(first, ModuleNotFoundError) and first.name == "dgl":
            raise ImportError("backend 'dgl' needs DGL: pip install dgl==2.1.0 (Linux, Python 3.8-3.12)") from None
        for name in [name for name in sys.modules if name.split(".")[0] == "dgl"]:
            del sys.modules[name]
        for name in ("dgl.distributed", "dgl.data.movielens"):
            stub = sys.modules[name] = types.ModuleType(name)
            stub.__getattr__ = _stub_attribute
        import dgl
    return dgl


class DGLAdapter:
    """A NeighborSampler in the place of DGL's own: DataLoader(graph, nodes, DGLAdapter(sampler), batch_size=1024).

    Each batch is DGL's (input_nodes, output_nodes, blocks). The sampler holds the graph (graph.adj_tensors("csc")
    gives indptr and indices); the DataLoader's graph is not looked at. Works in the DataLoader's worker processes too.
    """

    def __init__(self, sampler):
        self.sampler, self._calls = sampler, itertools.count()

    def sample(self, graph, seeds, exclude_eids=None):
        """What DGL's DataLoader calls for a batch of seeds int [S]."""
        if exclude_eids is not None:
            raise ValueError("exclude_eids is not supported: DGLAdapter is for node batches")
        worker = torch.utils.data.get_worker_info()  # its seed differs from worker to worker and epoch to epoch
        blocks = self.sampler.sample(seeds, next(self._calls) + (worker.seed if worker else 0))
        return blocks[0].src_nodes, seeds, [block.to_dgl() for block in blocks]


# ---------------------------------------------------------------------------------------------------------------------
# The law. All arithmetic modulo 2^64 with logical shifts; in torch int64 the products wrap exactly.

_MASK = (1 << 64) - 1


def _signed(x):
    return x - (1 << 64) if x >> 63 else x


def mix(z):
    """The splitmix64 finaliser on a Python int, modulo 2^64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def hop_key(seed, step, hop):
    """The 64-bit key of one hop of one step; hop 0 is the hop next to the seeds."""
    return mix(mix(mix(seed & _MASK) ^ (step & _MASK)) ^ hop)


def _shift(z, n):  # logical: an arithmetic shift, then the copied sign bits masked off
    return (z >> n).bitwise_and_((1 << (64 - n)) - 1)


def _mix(z):  # mix() on int64 tensors
    z = z + _signed(0x9E3779B97F4A7C15)
    z = _shift(z, 30).bitwise_xor_(z).mul_(_signed(0xBF58476D1CE4E5B9))
    z = _shift(z, 27).bitwise_xor_(z).mul_(_signed(0x94D049BB133111EB))
    return _shift(z, 31).bitwise_xor_(z)


def _draw(key, v, j):  # 32 random bits as int64, for int64 tensors v and j that broadcast
    return _shift(_mix(_mix(v ^ _signed(key)) ^ j), 32)


# ---------------------------------------------------------------------------------------------------------------------


class NeighborSampler:
    """Sample the in-neighbourhood of seed nodes, one `Block` a hop, by GraphSAGE (arXiv 1706.02216) or LABOR.

    Args:
        indptr: int64 [V+1], indices: int32 or int64 [M]: the graph, CSC over in-edges, on one device.
        fanouts: neighbours a node takes, from the seeds outward (15,10,5: 15 for each seed, then 10 for each of
            those, then 5); -1 takes all. DGL lists the same in the opposite order.
        replace: draw with replacement (uniform only).
        method: "uniform", or "labor" (LABOR-0, arXiv 2210.13339): k neighbours on average, chosen so that seeds with
            common neighbours take the same ones, which makes the outer hops smaller.
        weights: float [M], not negative: draw without replacement with probability following the weights
            (Efraimidis-Spirakis 2006); edges of weight 0 are never taken.
        seed: any int; the same seed and step give the same blocks.
        edge_ids: also return where each edge stands in `indices`.
        backend: "native" (C, compiled at first use), "torch" (plain ops, any device), "dgl" (DGL's operators and random
            numbers), or "auto": native where it can be had, else torch.
        check: validate the graph once, here (one pass over indices).
        threads: of one `sample` call of the native backend; default torch.get_num_threads().

    `sample` may be called from several threads at once.

    Raises:
        ValueError, TypeError: the argument, its value and what would have worked.
    """

    def __init__(
        self, indptr, indices, fanouts, *, replace=False, method="uniform", weights=None, seed=0, edge_ids=False,
        backend="auto", check=True, threads=None,
    ):  # fmt: skip
        self.fanouts = [int(k) for k in fanouts]
        self.replace, self.method, self.seed, self.edge_ids = replace, method, int(seed), edge_ids
        self.indptr, self.indices, self.weights = indptr, indices, weights
        self.backend, self.threads = backend, threads
        self._check_options()
        if check:
            _check_graph(indptr, indices, weights)
        self.indptr, self.indices = indptr, indices = indptr.contiguous(), indices.contiguous()  # read through pointers
        self.weights = weights = None if weights is None else weights.contiguous()
        self.num_nodes = indptr.numel() - 1
        if backend in ("auto", "native"):
            if indices.is_cuda:  # private to torch, 2.10 and later: the torch backend stands in where it is missing
                self.backend = "native" if hasattr(torch.cuda, "_compile_kernel") else "torch"
            else:
                self._native = _library(indices.dtype)
                self.backend = "native" if self._native else "torch"
        self._scratch, self._slots = [], 0  # native: working memory at rest, table slots that the last batch needed
        self._mode = 3 if weights is not None else 2 if method == "labor" else int(replace)  # the enum of _LAW
        narrow = weights is not None and weights.dtype != torch.float64 and not indices.is_cuda
        self._weights = (weights.float(), None) if narrow else (None, None if weights is None else weights.double())
        self._kernels = _Kernels(indices.dtype)
        self._lock = threading.Lock()  # one batch at a time owns the position table
        self._table = None  # [V] position of a node in src_nodes, V at rest; made at first use
        self._dgl_graph = _dgl_graph(indptr, indices, weights) if self.backend == "dgl" else None

    def _check_options(self):
        if not self.fanouts or any(k == 0 or k < -1 for k in self.fanouts):
            raise ValueError(f"fanouts {self.fanouts}: give one number for each hop, positive or -1 (all neighbours)")
        if self.method not in ("uniform", "labor"):
            raise ValueError(f"method {self.method!r} is not known; use 'uniform' or 'labor'")
        if self.backend not in ("auto", "native", "torch", "dgl"):
            raise ValueError(f"backend {self.backend!r} is not known; use 'native', 'torch', 'dgl' or 'auto'")
        if self.replace and -1 in self.fanouts:
            raise ValueError(f"fanouts {self.fanouts}: -1 (all neighbours) has no meaning with replace=True")
        if (self.replace, self.method != "uniform", self.weights is not None).count(True) > 1:
            raise ValueError("replace, method='labor' and weights exclude each other; choose one")

    def sample(self, seeds, step, *, relabel_outer=True):
        """Sample the neighbourhood of `seeds`.

        Args:
            seeds: int32 or int64 [S], distinct node ids.
            step: int, the number of the batch; it keys the random draws.
            relabel_outer: False leaves global ids in blocks[0].indices, for a model that aggregates the first layer
                straight out of the feature table; its src_nodes are then the destinations alone.

        Returns:
            One Block for each fanout; blocks[0] is the outermost hop, blocks[-1] has the seeds as destinations, and
            blocks[i].src_nodes starts with blocks[i+1].src_nodes.

        Raises:
            TypeError, IndexError, ValueError: seeds of another type, out of range, or repeated.
        """
        seeds = self._check_seeds(seeds)
        if self.backend == "native" and not seeds.is_cuda:
            return self._sample_native(seeds, step, relabel_outer)
        with self._lock:
            if self.backend == "native":
                return self._sample_cuda(seeds, step, relabel_outer)
            blocks = (self._sample_dgl if self.backend == "dgl" else self._sample_torch)(seeds, step)
        if not relabel_outer:
            outer = blocks[0]
            globals_ = outer.src_nodes.index_select(0, outer.indices)
            blocks[0] = outer._replace(indices=globals_, src_nodes=outer.src_nodes[: outer.num_dst])
        return blocks

    def _check_seeds(self, seeds):
        if not isinstance(seeds, Tensor) or seeds.dtype not in (torch.int32, torch.int64) or seeds.dim() != 1:
            got = f"{seeds.dtype} {list(seeds.shape)}" if isinstance(seeds, Tensor) else type(seeds).__name__
            raise TypeError(f"seeds must be a 1-D int32 or int64 tensor of node ids, not {got}")
        if seeds.numel():
            low, high = (int(x) for x in seeds.aminmax())
            if low < 0 or high >= self.num_nodes:
                bad = low if low < 0 else high
                raise IndexError(f"seeds contains {bad}; node ids of this graph are 0 to {self.num_nodes - 1}")
        return seeds.to(self.indptr.device, self.indices.dtype).contiguous()

    # -- native

    def _sample_native(self, seeds, step, relabel_outer):
        """The C code, a hop at a time; working memory is as large as the batch, not the graph."""
        try:
            scratch = self._scratch.pop()  # atomic, as append is: calls on several threads never share one
        except IndexError:
            scratch = _Scratch(self._native, self.indices.dtype)
        try:
            src, blocks = seeds, []
            if scratch.number(src, max(self._slots, 2 * src.numel())) >= 0:
                raise ValueError(_repeated(seeds))
            for hop, k in enumerate(self.fanouts):
                relabel = relabel_outer or hop + 1 < len(self.fanouts)
                blocks.append(self._hop_native(scratch, src, k, hop_key(self.seed, step, hop), relabel))
                src = blocks[-1].src_nodes
            self._slots = scratch.slots  # the next batch will need about as many
        finally:
            self._scratch.append(scratch)
        return blocks[::-1]

    def _hop_native(self, scratch, src, k, key, relabel):
        S, dtype, threads = src.numel(), self.indices.dtype, self.threads or torch.get_num_threads()
        weights = [None if w is None else w.data_ptr() for w in self._weights]
        call = ctypes.byref(_Hop(self.indptr.data_ptr(), self.indices.data_ptr(), *weights, self._mode, k, key))
        offsets = torch.empty(S + 1, dtype=dtype)
        scratch.rows(S)
        rows = (src.data_ptr(), S, scratch.start.data_ptr(), scratch.degree.data_ptr(), offsets.data_ptr())
        E = self._native.rb_count(call, *rows, threads)
        if E < 0:
            raise MemoryError(f"no memory to sample a hop of {S} nodes")
        if E > torch.iinfo(dtype).max:
            raise ValueError(f"this hop has {E} edges, too many for {dtype} blocks; use smaller batches or fanouts")
        local, edges = torch.empty(E, dtype=dtype), torch.empty(E if self.edge_ids else 0, dtype=torch.int64)
        nodes, table = src, (None, 0)
        if relabel:
            if 2 * min(S + E, self.num_nodes) > scratch.slots:
                scratch.number(src, 2 * min(S + E, self.num_nodes))
            nodes = torch.empty(S + E + 1, dtype=dtype)
            table = (scratch.data.data_ptr(), scratch.bits)
        edge_pointer = edges.data_ptr() if self.edge_ids else None
        N = self._native.rb_hop(call, *rows, local.data_ptr(), edge_pointer, nodes.data_ptr(), *table, threads)
        if N < 0:
            raise MemoryError(f"no memory to sample a hop of {S} nodes")
        return Block(offsets, local, nodes[:N], edges if self.edge_ids else None)

    # -- native on CUDA

    def _sample_cuda(self, seeds, step, relabel_outer):
        """The kernels, hop after hop, in buffers of the largest size possible; the host waits once, for the sizes.

        Only fanout -1 and LABOR, whose edges have no such bound, make it wait once a hop.
        """
        V = torch.full((1,), self.num_nodes, device=seeds.device)
        N = torch.full_like(V, seeds.numel())
        try:
            if self._table is None:
                self._table = self.indices.new_full((self.num_nodes,), self.num_nodes)
            numbers = torch.arange(seeds.numel(), dtype=seeds.dtype, device=seeds.device)
            self._table.scatter_(0, seeds.long(), numbers)
            sizes, hops, src = [(self._table.index_select(0, seeds) != numbers).sum().view(1), N], [], seeds
            for hop, k in enumerate(self.fanouts):
                relabel = relabel_outer or hop + 1 < len(self.fanouts)
                hops.append(self._hop_cuda(src, N, V, k, hop_key(self.seed, step, hop), relabel))
                *_, src, E, N = hops[-1]
                sizes += [E, N]
            self._kernels("forget", src.numel(), src, N, self._table, V)
            repeated, S, *sizes = torch.cat(sizes).tolist()  # the one wait
            if repeated:
                raise ValueError(_repeated(seeds))
        except BaseException:
            self._table = None  # half-written: the next batch starts from a fresh one
            raise
        blocks = []
        for (offsets, local, edges, src, _, _), E, N in zip(hops, sizes[::2], sizes[1::2]):
            indptr = offsets[: S + 1].to(seeds.dtype)
            blocks.append(Block(indptr, local[:E], src[:N], edges[:E] if self.edge_ids else None))
            S = N
        return blocks[::-1]

    def _hop_cuda(self, src, N, V, k, key, relabel):
        """One hop of destinations src [bound], of which the first N count; N, V and what is returned stay there."""
        bound, integers = src.numel(), {"dtype": torch.int64, "device": src.device}
        weights = self.indptr if self._weights[1] is None else self._weights[1]  # a pointer that is not followed
        graph = (self.indptr, self.indices, weights, self._mode, k, key >> 32, key & 0xFFFFFFFF)
        start, degree, count = torch.empty(3, bound, **integers)
        self._kernels("count_rows", bound, *graph, src, N, bound, start, degree, count)
        offsets = _prefix_sum(count)
        E = offsets[-1:]
        most = int(E) if k < 0 or self.method == "labor" else bound * k
        if most + bound >= 2**31:
            raise ValueError(f"a hop of up to {most} edges is too large for the GPU kernels; use smaller batches")
        edges, scratch = torch.empty(most, **integers), torch.empty(most if self._mode == 3 else 0, **integers)
        self._kernels("pick_rows", bound, *graph, src, N, start, degree, offsets, edges, scratch)
        local = src.new_empty(most)
        self._kernels("claim", most, self.indices, edges, E, most, local, self._table, V, int(relabel))
        if relabel and most:
            win = torch.empty(most, dtype=torch.int32, device=src.device)
            self._kernels("mark", most, local, E, most, self._table, win)
            rank = win.cumsum(0)
            src = torch.cat([src, src.new_empty(min(most, self.num_nodes))])
            self._kernels("place", most, local, E, win, rank, N, self._table, src)
            self._kernels("lookup", most, local, E, self._table)
            N = N + rank[-1:]
        return offsets, local, edges, src, E, N

    # -- plain torch ops

    def _sample_torch(self, seeds, step):
        if self._table is None:
            self._table = self.indices.new_full((self.num_nodes,), self.num_nodes)
        try:
            position = torch.arange(seeds.numel(), dtype=seeds.dtype, device=seeds.device)
            self._table.scatter_(0, seeds.long(), position)
            if not torch.equal(self._table.index_select(0, seeds), position):
                raise ValueError(_repeated(seeds))
            src, blocks = seeds, []
            for hop, k in enumerate(self.fanouts):
                indptr, edges = self._pick(src.long(), k, hop_key(self.seed, step, hop))
                src, local = self._relabel(src, self.indices.index_select(0, edges).long())
                blocks.append(Block(indptr, local, src, edges if self.edge_ids else None))
            self._table.index_fill_(0, src.long(), self.num_nodes)
        except BaseException:
            self._table = None  # half-written: the next batch starts from a fresh one
            raise
        return blocks[::-1]

    def _pick(self, v, k, key):
        """Choose edges of nodes v int64 [S] -> block indptr [S+1], positions in the graph's indices int64 [E]."""
        start = self.indptr.index_select(0, v)
        degree = self.indptr.index_select(0, v + 1) - start
        if self.method == "labor" or self.weights is not None:
            indptr, edges = _prefix_sum(degree), _expand(start, degree)
            row = torch.repeat_interleave(torch.arange(v.numel(), device=v.device), degree)
            if self.method == "labor":
                kept = self._keep_labor(edges, degree[row], k, key)
            else:
                kept = self._keep_heaviest(edges, row, edges - start[row], v[row], k, key)
            return _prefix_sum(kept)[indptr].to(self.indices.dtype), edges[kept]
        if self.replace:
            counts = torch.where(degree > 0, k, 0)
            rows = (degree > 0).nonzero().squeeze(1)  # [R] rows that draw
        else:
            counts = degree if k < 0 else degree.clamp(max=k)
            rows = (degree > counts).nonzero().squeeze(1)
        indptr, edges = _prefix_sum(counts), _expand(start, counts)
        if rows.numel():
            j = torch.arange(k, device=v.device).unsqueeze(1)  # [k, 1]
            bits, d = _draw(key, v[rows], j), degree[rows]  # [k, R], [R]
            pick = (bits * d) >> 32 if self.replace else _floyd(bits, d)
            edges.index_put_((indptr[rows] + j,), start[rows] + pick)
        return indptr.to(self.indices.dtype), edges

    def _keep_labor(self, edges, degree, k, key):
        """LABOR-0: mask [E] of the edges whose source's own draw falls under k / degree."""
        if k < 0:
            return torch.ones_like(edges, dtype=torch.bool)
        return _draw(key, self.indices[edges].long(), 0) * degree <= k << 32

    def _keep_heaviest(self, edges, row, position, v, k, key):
        """Efraimidis-Spirakis: mask [E] of the k largest log(uniform) / weight of each row."""
        weight = self.weights[edges].double()
        if k < 0:
            return weight > 0
        uniform = (_draw(key, v, position).double() + 0.5) * 2.0**-32
        order = torch.argsort(uniform.log_().div_(weight), descending=True, stable=True)
        order = order[torch.argsort(row[order], stable=True)]  # by row, the largest first; rows keep their extent
        rank = torch.empty_like(position).scatter_(0, order, position)
        return (rank < k) & (weight > 0)

    def _relabel(self, src, ids):
        """Number the new nodes among ids int64 [E] by first appearance -> src_nodes [N], positions in it [E]."""
        local = self._table.index_select(0, ids)
        new = (local == self.num_nodes).nonzero().squeeze(1)  # [E'] edges to nodes that have no number yet
        ids = ids[new]
        claim = torch.arange(-ids.numel(), 0, dtype=src.dtype, device=src.device)  # below every number: they stay apart
        self._table.scatter_reduce_(0, ids, claim, "amin")  # the first edge wins, whatever the order of writes
        winners = ids[self._table.index_select(0, ids) == claim]
        numbers = torch.arange(src.numel(), src.numel() + winners.numel(), dtype=src.dtype, device=src.device)
        self._table.scatter_(0, winners, numbers)
        local[new] = self._table.index_select(0, ids)
        return torch.cat([src, winners.to(src.dtype)]), local

    # -- DGL's operators

    def _sample_dgl(self, seeds, step):
        """DGL's sample_neighbors / sample_labors and to_block; follows DGL's random numbers, not the law."""
        dgl, graph = import_dgl(), self._dgl_graph
        if seeds.unique().numel() < seeds.numel():
            raise ValueError(_repeated(seeds))
        dgl.seed(hop_key(self.seed, step, 0) >> 33)
        prob = None if self.weights is None else "weight"
        src, blocks = seeds.to(graph.idtype), []
        for k in self.fanouts:
            if self.method == "labor":
                picked = dgl.sampling.sample_labors(graph, src, k, prob=prob)[0]
            else:
                picked = dgl.sampling.sample_neighbors(graph, src, k, prob=prob, replace=self.replace)
            block = dgl.to_block(picked, src)
            indptr, indices, order = block.adj_tensors("csc")
            edge_ids = picked.edata[dgl.EID][block.edata[dgl.EID][order].long()].long() if self.edge_ids else None
            src = block.srcdata[dgl.NID]
            dtype = self.indices.dtype
            blocks.append(Block(indptr.to(dtype), indices.to(dtype), src.to(dtype), edge_ids))
        return blocks[::-1]


def _prefix_sum(counts):  # [S] -> [S+1], starting at 0
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0)])


def _expand(start, counts):  # start, start+1, ..., start+count-1 of every row, one after the other: [E]
    shift = start - counts.cumsum(0) + counts
    return torch.repeat_interleave(shift, counts) + torch.arange(int(counts.sum()), device=start.device)


def _floyd(bits, degree):
    """Floyd's algorithm (CACM 30(9), 1987): k distinct positions below degree for every row, from bits [k, R]."""
    last = degree - bits.shape[0] + torch.arange(bits.shape[0], device=bits.device).unsqueeze(1)  # [k, R] d - k + j
    pick = (bits * (last + 1)) >> 32
    for j in range(1, pick.shape[0]):
        pick[j] = torch.where((pick[:j] == pick[j]).any(0), last[j], pick[j])
    return pick


def _dgl_graph(indptr, indices, weights):
    dgl = import_dgl()
    dtype = torch.int32 if indices.dtype == torch.int32 and indices.numel() < 2**31 else torch.int64
    csc = (indptr.to(dtype), indices.to(dtype), indices.new_empty(0, dtype=dtype))
    graph = dgl.graph(("csc", csc), num_nodes=indptr.numel() - 1)
    if weights is not None:
        graph.edata["weight"] = weights
    return graph


def _repeated(seeds):
    values, counts = seeds.unique(return_counts=True)
    return f"seeds contains node {int(values[counts > 1][0])} more than once; each seed may come once in a batch"


def _check_graph(indptr, indices, weights):
    """Raise unless indptr, indices and weights form a CSC graph."""
    if indptr.dtype != torch.int64 or indptr.dim() != 1 or not indptr.numel():
        raise TypeError(f"indptr must be int64 [V+1], not {indptr.dtype} {list(indptr.shape)}")
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 1:
        raise TypeError(f"indices must be int32 or int64 [M], not {indices.dtype} {list(indices.shape)}")
    if int(indptr[0]) != 0 or int(indptr[-1]) != indices.numel():
        raise ValueError(
            f"indptr runs from {int(indptr[0])} to {int(indptr[-1])}; it must run from 0 to the length of indices, "
            f"{indices.numel()}"
        )
    falls = (indptr[1:] < indptr[:-1]).nonzero()
    if falls.numel():
        v = int(falls[0])
        raise ValueError(f"indptr falls from {int(indptr[v])} to {int(indptr[v + 1])} at node {v}; it must never fall")
    if indices.numel():
        low, high = (int(x) for x in indices.aminmax())
        if low < 0 or high >= indptr.numel() - 1:
            bad = low if low < 0 else high
            raise ValueError(f"indices contains {bad}; the {indptr.numel() - 1} nodes of indptr are counted from 0")
    if weights is not None:
        if not weights.is_floating_point() or weights.shape != indices.shape:
            raise TypeError(f"weights must be float [M={indices.numel()}], not {weights.dtype} {list(weights.shape)}")
        if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
            raise ValueError("weights contains a negative, infinite or NaN value; they must be finite and >= 0")


# ---------------------------------------------------------------------------------------------------------------------
# Native code. `_LAW` is compiled into the C library and into the CUDA kernels alike: one text, the same bits.

_LAW = r"""
typedef unsigned long long u64;
typedef long long i64;
enum { UNIFORM, REPLACE, LABOR, WEIGHTED };

FN u64 mix(u64 z) {
  z += 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}
FN u64 draw(u64 key, u64 v, u64 j) { return mix(mix(key ^ v) ^ j) >> 32; }

typedef struct {  // one hop: what to draw from, and how
  const i64 *indptr; const ID *indices; const float *w32; const double *w64; i64 mode, k; u64 key;
} hop_t;

FN double weight(const hop_t *h, i64 e) { return h->w32 ? h->w32[e] : h->w64[e]; }
FN int labor_keeps(const hop_t *h, i64 e, i64 d) {
  return h->k < 0 || draw(h->key, (u64)h->indices[e], 0) * (u64)d <= (u64)h->k << 32;
}

// Edges that a row of degree d, whose list starts at `start`, will have.
FN i64 count_row(const hop_t *h, i64 start, i64 d) {
  i64 n = 0;
  if (h->mode == REPLACE) return d ? h->k : 0;
  if (h->mode == LABOR) for (i64 p = 0; p < d; p++) n += labor_keeps(h, start + p, d);
  else if (h->mode == WEIGHTED) for (i64 p = 0; p < d; p++) n += weight(h, start + p) > 0;
  else n = d;
  return h->mode == LABOR || h->k < 0 || n < h->k ? n : h->k;
}

// Restore a min-heap below i, ordered by key, of equal keys the later position first.
FN void sift(double *key, i64 *pos, i64 n, i64 i) {
  for (i64 c; (c = 2 * i + 1) < n; i = c) {
    if (c + 1 < n && (key[c + 1] < key[c] || (key[c + 1] == key[c] && pos[c + 1] > pos[c]))) c++;
    if (key[i] < key[c] || (key[i] == key[c] && pos[i] > pos[c])) return;
    double a = key[i]; key[i] = key[c]; key[c] = a;
    i64 b = pos[i]; pos[i] = pos[c]; pos[c] = b;
  }
}

// The n heaviest edges (Efraimidis-Spirakis) in stored order; `key` [n] is scratch.
FN void pick_heaviest(const hop_t *h, u64 v, i64 start, i64 d, i64 n, i64 *out, double *key) {
  i64 have = 0;
  for (i64 p = 0; p < d; p++) {
    double w = weight(h, start + p);
    if (!(w > 0)) continue;
    double x = log(((double)draw(h->key, v, p) + 0.5) * (1.0 / 4294967296.0)) / w;
    if (have < n) {
      key[have] = x, out[have++] = start + p;
      if (have == n) for (i64 i = n / 2; i-- > 0;) sift(key, out, n, i);
    } else if (x > key[0]) key[0] = x, out[0] = start + p, sift(key, out, n, 0);
  }
  for (i64 i = 0; i < n; i++) key[i] = -(double)out[i];  // heapsort by position
  for (i64 i = n / 2; i-- > 0;) sift(key, out, n, i);
  for (i64 m = n; m-- > 1;) {
    i64 last = out[0]; out[0] = out[m]; out[m] = last;
    double x = key[0]; key[0] = key[m]; key[m] = x;
    sift(key, out, m, 0);
  }
}

// Write the n = count_row() chosen positions in the graph's indices to out.
FN void pick_row(const hop_t *h, u64 v, i64 start, i64 d, i64 n, i64 *out, double *key) {
  i64 k = h->k;
  if (h->mode == WEIGHTED) pick_heaviest(h, v, start, d, n, out, key);
  else if (h->mode == LABOR) { for (i64 p = 0; p < d; p++) if (labor_keeps(h, start + p, d)) *out++ = start + p; }
  else if (h->mode == REPLACE) for (i64 j = 0; j < n; j++) out[j] = start + (draw(h->key, v, j) * (u64)d >> 32);
  else if (n == d) for (i64 j = 0; j < n; j++) out[j] = start + j;
  else for (i64 j = 0; j < n; j++) {  // Floyd
    i64 t = start + (draw(h->key, v, j) * (u64)(d - k + j + 1) >> 32);
    for (i64 q = 0; q < j; q++) if (out[q] == t) { t = start + d - k + j; break; }
    out[j] = t;
  }
}
"""

_C = r"""
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#define FN static inline
""" + _LAW + r"""
#define ROWS 512      // rows a thread takes at a time
#define VECTOR_K 64   // largest fanout of the vector path
#define AHEAD 96      // how far ahead memory is prefetched, in edges: many cache misses are in flight
#define MIN(a, b) ((a) < (b) ? (a) : (b))

typedef struct { ID node, number; } slot_t;  // of an open-addressing hash table; node -1: empty

typedef struct job {
  hop_t hop; const ID *v; i64 S;        // rows: the destinations
  i64 *start, *degree; ID *offsets;     // [S] [S] [S+1]
  ID *local; i64 *edges;                // [E] [E or null]
  ID *src; i64 N; slot_t *table; int bits;  // table null: no relabelling
  i64 chunks; atomic_llong next; atomic_char *ready; atomic_int failed;
  void (*work)(struct job *, i64, void **, i64 *);
} job_t;

// Run job->work on every chunk of rows, on several threads; `relabel` (may be null) follows in order on this one.
static void *run(void *x) {
  job_t *j = x; void *scratch = 0; i64 size = 0;
  for (i64 c; (c = atomic_fetch_add(&j->next, 1)) < j->chunks;) j->work(j, c, &scratch, &size), atomic_store(&j->ready[c], 1);
  free(scratch);
  return 0;
}
static int run_all(job_t *j, i64 threads, void (*relabel)(job_t *, i64)) {
  pthread_t id[64]; void *scratch = 0; i64 size = 0, c, started = 0;
  j->chunks = (j->S + ROWS - 1) / ROWS;
  atomic_init(&j->next, 0); atomic_init(&j->failed, 0);
  if (!(j->ready = calloc(j->chunks + 1, 1))) return -1;
  for (threads = MIN(MIN(threads, 64), j->chunks); started < threads - 1; started++)
    if (pthread_create(&id[started], 0, run, j)) break;  // fewer threads: the same result
  for (i64 done = 0; done < j->chunks;) {
    if (atomic_load(&j->ready[done])) { if (relabel && !j->failed) relabel(j, done); done++; }
    else if (j->next < j->chunks && (c = atomic_fetch_add(&j->next, 1)) < j->chunks)
      j->work(j, c, &scratch, &size), atomic_store(&j->ready[c], 1);
    else sched_yield();
  }
  while (started) pthread_join(id[--started], 0);
  free(scratch); free((void *)j->ready);
  return j->failed ? -1 : 0;
}

static void count_chunk(job_t *j, i64 c, void **scratch, i64 *size) {
  i64 a = c * ROWS, b = MIN(a + ROWS, j->S);
  for (i64 i = a; i < b; i++) {
    __builtin_prefetch(&j->hop.indptr[j->v[MIN(i + 32, b - 1)]]);
    j->start[i] = j->hop.indptr[j->v[i]];
    j->degree[i] = j->hop.indptr[j->v[i] + 1] - j->start[i];
    if (j->hop.mode >= LABOR) continue;
    j->offsets[i + 1] = (ID)count_row(&j->hop, j->start[i], j->degree[i]);
  }
  if (j->hop.mode >= LABOR) for (i64 i = a; i < b; i++) {
    const void *list = j->hop.mode == LABOR ? (void *)(j->hop.indices + j->start[MIN(i + 4, b - 1)]) : 0;
    if (list) __builtin_prefetch(list);
    j->offsets[i + 1] = (ID)count_row(&j->hop, j->start[i], j->degree[i]);
  }
}

// Floyd for n rows at once: pick[j][i] is draw j of row i; h = mix(key ^ v), d = degree, k <= d. One text, compiled
// for the processor at hand: the 64-bit products vectorise with AVX-512.
#define FLOYD(name, attribute)                                                                                   \
  attribute static void name(i64 n, i64 k, const u64 *restrict h, const uint32_t *restrict d,                    \
                             uint32_t (*restrict pick)[ROWS]) {                                                  \
    uint32_t taken[ROWS];                                                                                        \
    for (i64 j = 0; j < k; j++) {                                                                                \
      uint32_t *restrict t = pick[j];                                                                            \
      for (i64 i = 0; i < n; i++) t[i] = (mix(h[i] ^ (u64)j) >> 32) * (u64)(d[i] - k + j + 1) >> 32, taken[i] = 0; \
      for (i64 q = 0; q < j; q++) for (i64 i = 0; i < n; i++) taken[i] |= pick[q][i] == t[i];                    \
      for (i64 i = 0; i < n; i++) t[i] = taken[i] ? (uint32_t)(d[i] - k + j) : t[i];                             \
    }                                                                                                            \
  }
FLOYD(floyd_any, )
#if defined(__x86_64__) && defined(__GNUC__)
FLOYD(floyd_avx512, __attribute__((target("avx512f,avx512dq,avx512vl"))))
#define FLOYD_BEST (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? floyd_avx512 : floyd_any)
#else
#define FLOYD_BEST floyd_any
#endif

static void pick_chunk(job_t *j, i64 c, void **scratch, i64 *size) {
  i64 a = c * ROWS, b = MIN(a + ROWS, j->S), base = j->offsets[a], E = j->offsets[b] - base, k = j->hop.k, n = 0;
  u64 h[ROWS]; uint32_t d[ROWS], row[ROWS], pick[VECTOR_K][ROWS];
  if (*size < E) {  // E positions, then E keys for the weighted case
    free(*scratch);
    if (!(*scratch = malloc(16 * (*size = E + E / 4)))) { *size = 0; atomic_store(&j->failed, 1); return; }
  }
  i64 *pos = *scratch; double *key = (double *)(pos + E);
  for (i64 i = a; i < b; i++) {
    i64 count = j->offsets[i + 1] - j->offsets[i];
    if (j->hop.mode == UNIFORM && count < j->degree[i] && k <= VECTOR_K)
      row[n] = (uint32_t)i, d[n] = (uint32_t)j->degree[i], h[n++] = mix(j->hop.key ^ (u64)j->v[i]);
    else pick_row(&j->hop, (u64)j->v[i], j->start[i], j->degree[i], count, pos + j->offsets[i] - base, key + j->offsets[i] - base);
  }
  if (n) FLOYD_BEST(n, k, h, d, pick);
  for (i64 i = 0; i < n; i++)
    for (i64 q = 0; q < k; q++) pos[j->offsets[row[i]] - base + q] = j->start[row[i]] + pick[q][i];
  for (i64 e = 0; e < E; e++) {
    __builtin_prefetch(&j->hop.indices[pos[MIN(e + AHEAD, E - 1)]]);
    j->local[base + e] = j->hop.indices[pos[e]];
  }
  if (j->edges && E) memcpy(j->edges + base, pos, 8 * E);
}

static inline u64 home(ID node, int bits) { return (u64)node * 0x9e3779b97f4a7c15ULL >> (64 - bits); }
static inline ID number(slot_t *table, int bits, ID node, ID next) {  // of the node; `next` if it had none
  u64 i = home(node, bits);
  slot_t s = table[i];
  while (__builtin_expect(s.node != node && s.node != -1, 0)) s = table[i = (i + 1) & ((1ULL << bits) - 1)];
  s.number = s.node == node ? s.number : next;
  s.node = node;
  table[i] = s;
  return s.number;
}
static void relabel_chunk(job_t *j, i64 c) {
  i64 e = j->offsets[c * ROWS], end = j->offsets[MIN((c + 1) * ROWS, j->S)];
  ID n = (ID)j->N, *local = j->local, *src = j->src;
  for (; e < end; e++) {
    __builtin_prefetch(&j->table[home(local[MIN(e + AHEAD, end - 1)], j->bits)], 1);
    ID node = local[e];
    local[e] = number(j->table, j->bits, node, n);
    src[n] = node;  // overwritten by the next if this one is not new
    n += local[e] == n;
  }
  j->N = n;
}

// Empty a table and number n distinct nodes in it 0..n-1; returns the position of a repeated one, or -1.
i64 rb_number(slot_t *table, i64 bits, const ID *nodes, i64 n) {
  memset(table, 0xff, sizeof(slot_t) << bits);
  for (i64 i = 0; i < n; i++) {
    __builtin_prefetch(&table[home(nodes[MIN(i + AHEAD, n - 1)], bits)], 1);
    if (number(table, bits, nodes[i], (ID)i) != (ID)i) return i;
  }
  return -1;
}

// First half of a hop: start and degree of every row, offsets (prefix sum of the edges each will have); returns E.
i64 rb_count(const hop_t *hop, const ID *v, i64 S, i64 *start, i64 *degree, ID *offsets, i64 threads) {
  job_t j = {.hop = *hop, .v = v, .S = S, .start = start, .degree = degree, .offsets = offsets, .work = count_chunk};
  i64 E = 0;
  if (run_all(&j, threads, 0)) return -1;
  offsets[0] = 0;
  for (i64 i = 1; i <= S; i++) offsets[i] = (ID)(E += offsets[i]);
  return E;
}

// Second half: draw, gather, and relabel by the table, which holds v; src, with room for S + E + 1, becomes v and the
// new nodes. Table null: local keeps global ids. Returns N, or -1 without memory. (Nothing here uses OpenMP: torch's
// own threads spin for a while after each parallel region, on the cores that these threads need.)
i64 rb_hop(const hop_t *hop, const ID *v, i64 S, i64 *start, i64 *degree, ID *offsets, ID *local, i64 *edges, ID *src,
           slot_t *table, i64 bits, i64 threads) {
  if (table && S) memcpy(src, v, sizeof(ID) * S);
  job_t j = {.hop = *hop, .v = v, .S = S, .start = start, .degree = degree, .offsets = offsets, .local = local,
             .edges = edges, .src = src, .N = S, .table = table, .bits = (int)bits, .work = pick_chunk};
  return run_all(&j, threads, table ? relabel_chunk : 0) ? -1 : j.N;
}

void rb_huge_pages(void *p, i64 bytes) {  // fewer TLB misses under random access; advice, may be ignored
#ifdef MADV_HUGEPAGE
  uintptr_t first = ((uintptr_t)p + 4095) & ~(uintptr_t)4095, last = ((uintptr_t)p + bytes) & ~(uintptr_t)4095;
  if (first < last) madvise((void *)first, last - first, MADV_HUGEPAGE);
#endif
}
"""

# Every kernel is one thread for each row or edge; sizes that only the device knows come as pointers, so the host
# launches for the upper bound and threads beyond the size leave. Nothing beyond atomicMin is used.
_CUDA = r"""
#define FN static __device__ inline
""" + _LAW + r"""
#define KERNEL extern "C" __global__ void
#define THREAD(n) i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; if (i >= (n)) return
#define HOP {indptr, indices, 0, weights, mode, k, (u64)(unsigned)high << 32 | (unsigned)low}
#define GRAPH const i64 *indptr, const ID *indices, const double *weights, int mode, int k, int high, int low

KERNEL count_rows(GRAPH, const ID *v, const i64 *S, int bound, i64 *start, i64 *degree, i64 *count) {
  THREAD(bound);
  if (i >= *S) { count[i] = 0; return; }
  hop_t hop = HOP;
  start[i] = indptr[v[i]];
  degree[i] = indptr[v[i] + 1] - start[i];
  count[i] = count_row(&hop, start[i], degree[i]);
}
KERNEL pick_rows(GRAPH, const ID *v, const i64 *S, const i64 *start, const i64 *degree, const i64 *offsets, i64 *edges,
                 double *key) {
  THREAD(*S);
  hop_t hop = HOP;
  i64 at = offsets[i];
  pick_row(&hop, (u64)v[i], start[i], degree[i], offsets[i + 1] - at, edges + at, key + at);
}
// table [V]: a node's number; V where it has none; below 0 the claim of an edge, the first of which wins.
KERNEL claim(const ID *indices, const i64 *edges, const i64 *E, int bound, ID *local, ID *table, const i64 *V, int relabel) {
  THREAD(*E);
  ID node = local[i] = indices[edges[i]];
  if (relabel && (table[node] < 0 || table[node] == *V)) atomicMin(&table[node], (ID)(i - bound));
}
KERNEL mark(const ID *local, const i64 *E, int bound, const ID *table, int *win) {
  THREAD(bound);
  win[i] = i < *E && table[local[i]] == (ID)(i - bound);
}
KERNEL place(const ID *local, const i64 *E, const int *win, const i64 *rank, const i64 *N, ID *table, ID *src) {
  THREAD(*E);
  if (win[i]) src[*N + rank[i] - 1] = local[i], table[local[i]] = (ID)(*N + rank[i] - 1);
}
KERNEL lookup(ID *local, const i64 *E, const ID *table) {
  THREAD(*E);
  local[i] = table[local[i]];
}
KERNEL forget(const ID *src, const i64 *N, ID *table, const i64 *V) {
  THREAD(*N);
  table[src[i]] = (ID)*V;
}
"""


class _Kernels:
    """The CUDA kernels, compiled by NVRTC at first use: kernels(name, bound, *arguments) runs `bound` threads."""

    def __init__(self, dtype):
        self.source = f"typedef {'int' if dtype == torch.int32 else 'long long'} ID;\n{_CUDA}"
        self.compiled = {}

    def __call__(self, name, bound, *arguments):
        kernel = self.compiled.get(name) or self.compiled.setdefault(name, torch.cuda._compile_kernel(self.source, name))
        if bound:
            kernel(grid=(-(-bound // 256), 1, 1), block=(256, 1, 1), args=list(arguments))


class _Hop(ctypes.Structure):
    """hop_t of the C code."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("indptr", "indices", "w32", "w64")]
    _fields_ += [("mode", ctypes.c_int64), ("k", ctypes.c_int64), ("key", ctypes.c_uint64)]


_FLAGS = ["-O3", "-fPIC", "-shared", "-pthread"]


class _Scratch:
    """What one `sample` call works in, kept for the next: a hash table from node id to its number in the batch, and
    the start and degree of every row. Grown when a batch needs more."""

    def __init__(self, library, dtype):
        self.library, self.data, self.bits = library, torch.empty(0, dtype=dtype), 0
        self.start = self.degree = torch.empty(0, dtype=torch.int64)

    def rows(self, S):
        """Room for S rows."""
        if self.start.numel() < S:
            self.start, self.degree = torch.empty(2, S + S // 8, dtype=torch.int64)

    @property
    def slots(self):
        return 1 << self.bits

    def number(self, nodes, slots):
        """Empty the table, make it at least `slots` large, number nodes; -1, or the position of a repeated one."""
        self.bits = max(4, (slots - 1).bit_length())
        if self.data.numel() < 2 * self.slots:
            self.data = self.data.new_empty(2 * self.slots)
            self.library.rb_huge_pages(self.data.data_ptr(), self.data.numel() * self.data.element_size())
        return self.library.rb_number(self.data.data_ptr(), self.bits, nodes.data_ptr(), nodes.numel())


@functools.lru_cache(maxsize=None)
def _library(dtype):
    """The compiled C code for node ids of a dtype, or None (after one warning) where it cannot be compiled."""
    width = f"-DID={'int32_t' if dtype == torch.int32 else 'int64_t'}"
    try:
        library = ctypes.CDLL(str(_compile(_C, os.environ.get("CC", "cc"), [*_FLAGS, width])))
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        warnings.warn(
            "the native sampler could not be compiled, so the slower torch backend is used; install a C compiler "
            f"(apt install gcc) or name one in the variable CC. Reason: {reason[0] if reason else error!r}",
            stacklevel=4,
        )
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.rb_number.argtypes = [pointer, number, pointer, number]
    library.rb_count.argtypes = [pointer, pointer, number, pointer, pointer, pointer, number]
    library.rb_hop.argtypes = [pointer, pointer, number] + [pointer] * 7 + [number, number]
    library.rb_huge_pages.argtypes = [pointer, number]
    for function in (library.rb_number, library.rb_count, library.rb_hop):
        function.restype = number
    return library


def _compile(source, compiler, flags):
    """Compile C into a shared library, once for each source, compiler and flags -> its path in a per-user cache."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    name = hashlib.sha256("\0".join([source, version, *flags, sys.platform, platform.machine()]).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringblock"
    target = folder / f"sampler-{name[:24]}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(folder)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="ringblock-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        target = folder / target.name
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # compiled aside, then renamed: complete or not there
        code, library = Path(scratch, "sampler.c"), Path(scratch, "sampler.so")
        code.write_text(source)
        subprocess.run([compiler, *flags, code, "-o", library, "-lm"], capture_output=True, text=True, check=True)
        os.replace(library, target)
    return target
