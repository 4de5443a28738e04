"""Neighbour sampling fused with block construction: seeds + CSC graph -> one `Block` a hop.

Copy this file with sampler_law.py, sampler_c.py and native.py into your own code; for graphs in GPU memory
sampler_cuda.py and native_cuda.py as well; for DGL sampler_dgl.py.
It works alone too: without those files beside it, torch operations stand in for them, after one warning.

    sampler = NeighborSampler(indptr, indices, fanouts=[15, 10, 5], seed=0)
    blocks = sampler.sample(seeds, step=0)     # blocks[0] outermost hop ... blocks[-1] has the seeds as dst
    x = features[blocks[0].src_nodes]          # input rows; then feed blocks[0], blocks[1], ... to the layers

Letters: V nodes and M edges of the graph; S seeds (destinations) of a block, N its sources, E its edges; k fanout.
The graph is CSC over in-edges: the in-neighbours of v are indices[indptr[v]:indptr[v+1]].

What is drawn is a function of (seed, step, hop, node) alone, through a counter-based generator (splitmix64 as a
hash; "the law" below). So results do not depend on threads, ranks, prefetch depth or device, every backend that
follows the law returns the same bits, and any step of a run can be drawn again.

A hop, fused. A GraphSAGE layer needs k neighbours of every destination, and a list of the distinct nodes among them
in which each edge names its source by position. Graph libraries usually do this by two operators: one samples edges
into a graph in global ids, the other hashes both ends of every edge and numbers them (DGL's `to_block`). Here a hop is
five passes over flat arrays, which read the graph and write the block, with nothing in between:

    degrees       where each destination's neighbour list begins, and its length
    prefix sum    where its edges will stand in the block: the block's indptr; the number of edges is known
    picks         k places in its list, by Floyd's algorithm: k draws, however long the list
    gather        the node ids at these places
    relabel       a node's number in the batch: the one it has, or the next

What that saves: no graph of sampled edges is built, sorted or read again, and destinations need no hashing, because
they are the sources of the hop before (or the seeds) and the table of numbers lasts for the whole batch. The outermost
hop, by far the largest, can do without relabelling too (`relabel_outer=False`). In C the passes also overlap: see the
first lines of sampler_c.py. `_Torch` below does the same five passes with torch operations, one after the other.
"""

import functools
import types
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import sampler_dgl
    from sampler_dgl import DGLAdapter, import_dgl  # noqa: F401  had from here
except ImportError:  # not copied along
    sampler_dgl = None


class Block(NamedTuple):
    """One bipartite hop, destination-major (CSC): messages go from `src_nodes` to the first S of them.

    Integers have the dtype of the graph's `indices` (int32 below 2^31 nodes), `edge_ids` are int64. Where edges have
    times a source is a node at a time: `src_nodes` may then hold a node more than once, each with another time.
    """

    indptr: Tensor  # [S+1] edges of destination s are indices[indptr[s]:indptr[s+1]]
    indices: Tensor  # [E] positions in src_nodes
    src_nodes: Tensor  # [N] global node ids; the first S are the seeds, in the order given
    edge_ids: Tensor | None = None  # [E] position of each edge in the graph's `indices`, when asked for
    src_times: Tensor | None = None  # int64 [N] times of the source nodes, where edges have times

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
        dgl = _dgl().import_dgl()
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


class DamagedGraph(IndexError):
    """A list in `indptr` or a node in `indices` lies outside of the graph, which nobody had checked."""


# ---------------------------------------------------------------------------------------------------------------------
# The sampler checks its arguments; a backend does the work. A backend is made from a _Task and has one method,
#
#     sample(seeds, hops, exclude, times) -> [(indptr, indices, src_nodes, edge_ids, src_times), ...],
#
# the fields of a Block for each hop, from the seeds outward; None if a seed comes twice. exclude is None or int64 [X]:
# edge ids, ascending, each once. times is int64 [S], None where edges have none. There is one in this file, _Torch, and
# one each in sampler_c.py, sampler_cuda.py and sampler_dgl.py, which import nothing from here: the task and the law are
# handed to them. The one for GPUs has sample(seeds, step, relabel_outer, exclude, times) instead, because it checks ids
# and computes keys on the GPU.


class _Task(NamedTuple):
    """What a backend is made from: the graph, contiguous and on one device, and how to draw from it."""

    indptr: Tensor  # int64 [V+1]
    indices: Tensor  # int32 or int64 [M]
    weights: Tensor | None  # float [M]
    edge_times: Tensor | None  # int64 [M], ascending in each list
    strict: bool  # edges at the time of their destination are not taken
    one_draw: bool  # all hops have the key of hop 0
    rule: str  # "uniform", "replace", "latest", "labor" or "weighted"
    edge_ids: bool  # whether blocks have them
    threads: int | None  # None: torch.get_num_threads()

    @property
    def rule_number(self):
        """The rule in C."""
        return ("uniform", "replace", "latest", "labor", "weighted").index(self.rule)


class _Hop(NamedTuple):
    """What to draw in one hop."""

    k: int  # fanout, -1: all
    key: int  # hop_key() of it
    relabel: bool  # False: indices keep global ids, src_nodes are the destinations alone


class NeighborSampler:
    """Sample the in-neighbourhood of seed nodes, one `Block` a hop, by GraphSAGE (arXiv 1706.02216) or LABOR.

    Args:
        indptr: int64 [V+1], indices: int32 or int64 [M]: the graph, CSC over in-edges, on one device.
        fanouts: neighbours a node takes, from the seeds outward (15,10,5: 15 for each seed, then 10 for each of
            those, then 5); -1 takes all. DGL lists the same in the opposite order.
        replace: draw with replacement (uniform only).
        method: "uniform"; "labor" (LABOR-0, arXiv 2210.13339): k neighbours on average, chosen so that seeds with
            common neighbours take the same ones, which makes the outer hops smaller; or "latest", for edges with times:
            the last k.
        layer_dependency, batch_dependency: of "labor": all hops take a node's neighbours by one draw, and so do as many
            steps in a row (GraphBolt's idea): fewer distinct sources, in a batch and from one batch to the next.
        weights: float [M], not negative: draw without replacement with probability following the weights
            (Efraimidis-Spirakis 2006); edges of weight 0 are never taken.
        edge_times: int64 [M], ascending in each neighbour list: `sample` is given a time for each seed, and a node
            takes from its edges up to the time of the seed that it is reached from; binary search finds the last.
        strict: only edges before that time.
        seed: any int; the same seed and step give the same blocks.
        edge_ids: also return where each edge stands in `indices`.
        backend: "native" (C on CPU, CUDA on GPU, compiled at first use), "torch" (plain operations, any device), "dgl"
            (DGL's operators and random numbers), or "auto": native where it can be had, else torch.
        check: validate the graph once, here (one pass over indices); without it, `sample` raises DamagedGraph when it
            reads something impossible.
        threads: of one `sample` call of the native backend; default torch.get_num_threads().

    `sample` may be called from several threads at once.

    Raises:
        ValueError, TypeError: the argument, its value and what would have worked.
    """

    def __init__(
        self, indptr, indices, fanouts, *, replace=False, method="uniform", layer_dependency=False, batch_dependency=1,
        weights=None, edge_times=None, strict=False, seed=0, edge_ids=False, backend="auto", check=True, threads=None,
    ):  # fmt: skip
        self.fanouts, self.seed, self.backend = [int(k) for k in fanouts], int(seed), backend
        _check_options(self.fanouts, replace, method, weights, edge_times, strict, backend)
        _check_dependency(method, layer_dependency, batch_dependency, backend)
        self.one_draw, self.steps_alike = bool(layer_dependency), int(batch_dependency)
        if check:
            _check_graph(indptr, indices, weights, edge_times)
        self.indptr, self.indices = indptr.contiguous(), indices.contiguous()  # C reads through pointers
        self.num_nodes = indptr.numel() - 1
        rule = "replace" if replace else method if weights is None else "weighted"
        weights, edge_times = (None if t is None else t.contiguous() for t in (weights, edge_times))
        task = _Task(
            self.indptr, self.indices, weights, edge_times, bool(strict), self.one_draw, rule, edge_ids, threads
        )
        self.timed = edge_times is not None
        native = _native(task, self.fanouts, self.seed) if backend in ("auto", "native") else None
        if backend == "dgl":
            self._backend = _dgl().Backend(task)
        elif native:
            self.backend, self._backend = "native", native
        else:
            self.backend, self._backend = "torch", _Torch(task)

    def sample(self, seeds, step, times=None, exclude=None, *, relabel_outer=True):
        """Sample the neighbourhood of `seeds`.

        Args:
            seeds: int32 or int64 [S], distinct node ids; with times a node may come again at another time.
            step: int, the number of the batch; it keys the random draws.
            times: int64 [S], the time of each seed, where the edges have times and only there.
            exclude: edges that are not taken in any hop, as if the graph did not have them: int32 or int64 [X], where
                they stand in `indices`, in any order; or a mask, bool [M], which is read from end to end. With a graph
                on a GPU the host waits for it once more.
            relabel_outer: False leaves global ids in blocks[0].indices, for a model that aggregates the first layer
                straight out of the feature table; its src_nodes are then the destinations alone.

        Returns:
            One Block for each fanout; blocks[0] is the outermost hop, blocks[-1] has the seeds as destinations, and
            blocks[i].src_nodes starts with blocks[i+1].src_nodes. With times the sources of a block are pairs of a node
            and a time, that of the destination that took it, numbered by first appearance of the pair.

        Raises:
            TypeError, IndexError, ValueError: seeds or edges of another type or out of range; seeds that are repeated;
                times that are missing or not asked for; edges to exclude with backend "dgl".
            DamagedGraph: an IndexError as well. Backend "torch" does not look for it on a GPU.
        """
        _check_ids("seeds", seeds, "node ids")
        if self.timed or times is not None:
            _check_times(times, seeds, self.timed)
        exclude = None if exclude is None else self._edge_set(exclude)
        step //= self.steps_alike
        if self.backend == "native" and self.indices.is_cuda:  # looks at the ids and computes the keys on the GPU
            work = (seeds, step, relabel_outer, exclude, times)
        else:
            _check_range(seeds, self.num_nodes)
            seeds, last = seeds.to(self.indices.device, self.indices.dtype).contiguous(), len(self.fanouts) - 1
            keys = [hop_key(self.seed, step, 0 if self.one_draw else i) for i in range(last + 1)]
            hops = [_Hop(k, key, relabel_outer or i < last) for i, (k, key) in enumerate(zip(self.fanouts, keys))]
            times = None if times is None else times.to(self.indices.device).contiguous()
            work = (seeds, hops, exclude, times)
        try:
            blocks = self._backend.sample(*work)
        except IndexError as error:  # not of the seeds: it was read from the graph
            said = "the graph is damaged: a list in indptr or a node in indices lies outside of it"
            raise DamagedGraph(said) from error
        if blocks is None:
            _check_range(seeds, self.num_nodes)
            pairs = torch.stack([seeds.cpu().long(), torch.zeros(len(seeds)).long() if times is None else times.cpu()])
            values, counts = pairs.unique(dim=1, return_counts=True)
            node, time = values[:, counts > 1][:, 0].tolist()
            which = f"node {node} at time {time}" if self.timed else f"node {node}"
            raise ValueError(f"seeds contains {which} more than once; each seed may come once in a batch")
        return [Block(*fields) for fields in reversed(blocks)]

    def _edge_set(self, exclude):
        """Edge ids or a mask -> int64 [X] on the graph's device, ascending, each once; None for no edges."""
        M = self.indices.numel()
        mask = isinstance(exclude, Tensor) and exclude.dtype == torch.bool and exclude.shape == (M,)
        if not mask:
            _check_ids("exclude", exclude, f"edge ids, or a bool mask [M={M}]")
        edges = exclude.nonzero().squeeze(1) if mask else exclude.to(self.indices.device, torch.int64).unique()
        if edges.numel() and not mask and (edges[0] < 0 or edges[-1] >= M):
            bad = int(edges[0] if edges[0] < 0 else edges[-1])
            raise IndexError(f"exclude contains {bad}; edge ids of this graph are 0 to {M - 1}")
        return edges.to(self.indices.device) if edges.numel() else None


def _dgl():
    """The module for DGL."""
    if sampler_dgl is None:
        raise ImportError("DGL is used through sampler_dgl.py: copy that file beside sampler.py")
    return sampler_dgl


def _native(task, fanouts, seed):
    """The native backend for the graph's device, or None where it cannot be had, after one warning."""
    try:
        import sampler_law

        if task.indices.is_cuda:
            import sampler_cuda

            return sampler_cuda.load(task, fanouts, seed, sampler_law.LAW)
        import sampler_c

        return sampler_c.load(task, sampler_law.LAW)
    except ModuleNotFoundError as error:
        _warn_missing(f"{error.name}.py")


@functools.cache
def _warn_missing(file):
    warnings.warn(f"the slower torch backend is used; for the native one copy {file} beside sampler.py", stacklevel=4)


def _Kernels(dtype):
    """The CUDA source of all kernels for node ids of a dtype, as `.source`: what a check without a GPU compiles."""
    import sampler_cuda
    import sampler_law

    source = sampler_cuda.source(dtype, sampler_law.LAW)
    try:
        import fused_kernels  # the layers'

        source += fused_kernels.source(dtype)
    except ImportError:
        pass
    return types.SimpleNamespace(source=source)


def _check_options(fanouts, replace, method, weights, edge_times, strict, backend):
    if not fanouts or any(k == 0 or k < -1 for k in fanouts):
        raise ValueError(f"fanouts {fanouts}: give one number for each hop, positive or -1 (all neighbours)")
    if method not in ("uniform", "labor", "latest"):
        raise ValueError(f"method {method!r} is not known; use 'uniform', 'labor' or 'latest'")
    if backend not in ("auto", "native", "torch", "dgl"):
        raise ValueError(f"backend {backend!r} is not known; use 'native', 'torch', 'dgl' or 'auto'")
    if replace and -1 in fanouts:
        raise ValueError(f"fanouts {fanouts}: -1 (all neighbours) has no meaning with replace=True")
    if (bool(replace), method != "uniform", weights is not None).count(True) > 1:
        method = "labor" if method == "uniform" else method
        raise ValueError(f"replace, method={method!r} and weights exclude each other; choose one")
    if edge_times is None and (strict or method == "latest"):
        what = "method 'latest'" if method == "latest" else "strict"
        raise ValueError(f"{what} goes by the times of edges; give edge_times")
    if edge_times is not None and backend == "dgl":
        raise ValueError("backend 'dgl' does not sample by edge_times; use 'native' or 'torch'")


def _check_dependency(method, layer_dependency, batch_dependency, backend):
    if batch_dependency < 1:
        raise ValueError(f"batch_dependency is {batch_dependency}: give the number of steps that draw alike, 1 or more")
    if not layer_dependency and batch_dependency == 1:
        return
    name = "layer_dependency" if layer_dependency else "batch_dependency"
    if method != "labor":
        raise ValueError(f"{name} is for method 'labor', not {method!r}")
    if backend == "dgl":
        raise ValueError(f"backend 'dgl' draws without {name}; use 'native' or 'torch'")


def _check_graph(indptr, indices, weights, edge_times):
    """Raise unless indptr, indices, weights and edge_times form a CSC graph."""
    for name, array in (("indptr", indptr), ("indices", indices)):
        if not isinstance(array, Tensor):
            raise TypeError(f"{name} is a {type(array).__name__}, a tensor is needed: torch.as_tensor({name})")
    if indptr.dtype != torch.int64 or indptr.dim() != 1 or not indptr.numel():
        raise TypeError(f"indptr must be int64 [V+1], not {indptr.dtype} {list(indptr.shape)}")
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 1:
        raise TypeError(f"indices must be int32 or int64 [M], not {indices.dtype} {list(indices.shape)}")
    first, last, M = int(indptr[0]), int(indptr[-1]), indices.numel()
    if first != 0 or last != M:
        raise ValueError(f"indptr runs from {first} to {last}; it must run from 0 to the length of indices, {M}")
    falls = (indptr[1:] < indptr[:-1]).nonzero()
    if falls.numel():
        v = int(falls[0])
        raise ValueError(f"indptr falls from {int(indptr[v])} to {int(indptr[v + 1])} at node {v}; it must never fall")
    if (bad := _outside(indices, indptr.numel() - 1)) is not None:
        raise ValueError(f"indices contains {bad}; the {indptr.numel() - 1} nodes of indptr are counted from 0")
    if weights is not None:
        if not weights.is_floating_point() or weights.shape != indices.shape:
            raise TypeError(f"weights must be float [M={M}], not {weights.dtype} {list(weights.shape)}")
        if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
            raise ValueError("weights contains a negative, infinite or NaN value; they must be finite and >= 0")
    if edge_times is not None:
        if edge_times.dtype != torch.int64 or edge_times.shape != indices.shape:
            raise TypeError(f"edge_times must be int64 [M={M}], not {edge_times.dtype} {list(edge_times.shape)}")
        falls = edge_times[1:] < edge_times[:-1]
        starts = indptr[(indptr > 0) & (indptr < M)]
        falls[starts - 1] = False  # from one list to the next
        if bool(falls.any()):
            e = int(falls.nonzero()[0]) + 1
            v = int(torch.searchsorted(indptr, e, right=True)) - 1
            was, then = int(edge_times[e - 1]), int(edge_times[e])
            raise ValueError(f"edge_times falls from {was} to {then} in the list of node {v}; sort each list by time")


def _check_ids(name, ids, what):
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name} must be a 1-D int32 or int64 tensor of {what}, not {got}")


def _check_times(times, seeds, timed):
    if not timed:
        raise ValueError("times are given and the edges have none; give the sampler edge_times")
    if not isinstance(times, Tensor) or times.dtype != torch.int64 or times.shape != seeds.shape:
        got = f"{times.dtype} {list(times.shape)}" if isinstance(times, Tensor) else type(times).__name__
        raise TypeError(f"times must be int64 [S={seeds.numel()}], one for each seed, as edges have times, not {got}")


def _check_range(seeds, num_nodes):
    if (bad := _outside(seeds, num_nodes)) is not None:
        raise IndexError(f"seeds contains {bad}; node ids of this graph are 0 to {num_nodes - 1}")


def _outside(ids, num_nodes):
    """One of the ids that is not a node, or None."""
    low, high = (int(x) for x in ids.aminmax()) if ids.numel() else (0, -1)
    return low if low < 0 else high if high >= num_nodes else None


# ---------------------------------------------------------------------------------------------------------------------
# The law. All arithmetic modulo 2^64 with logical shifts; in torch int64 the products wrap exactly.

_MASK = (1 << 64) - 1


def mix(z):
    """The splitmix64 finaliser on a Python int, modulo 2^64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def hop_key(seed, step, hop):
    """The 64-bit key of one hop of one step; hop 0 is the hop next to the seeds."""
    return mix(mix(mix(seed & _MASK) ^ (step & _MASK)) ^ hop)


def _signed(x):
    return x - (1 << 64) if x >> 63 else x


def _shift(z, n):  # logical: an arithmetic shift, then the copied sign bits masked off
    return (z >> n).bitwise_and_((1 << (64 - n)) - 1)


def _mix(z):  # mix() on int64 tensors
    z = z + _signed(0x9E3779B97F4A7C15)
    z = _shift(z, 30).bitwise_xor_(z).mul_(_signed(0xBF58476D1CE4E5B9))
    z = _shift(z, 27).bitwise_xor_(z).mul_(_signed(0x94D049BB133111EB))
    return _shift(z, 31).bitwise_xor_(z)


def _draw(key, v, j):  # 32 random bits as int64: draw j of node v, for int64 tensors that broadcast
    return _shift(_mix(_mix(v ^ _signed(key)) ^ j), 32)


# ---------------------------------------------------------------------------------------------------------------------
# The law as array programs, on any device.


class _Torch:
    """Plain torch operations: every pass over all destinations at once."""

    def __init__(self, task):
        self.task, self.num_nodes = task, task.indptr.numel() - 1
        # [V] a node's number in the batch, V where it has none. What a batch gave back is used again on the same stream
        # of a GPU, which has cleaned it by then; batches that are sampled at once have one each.
        self.tables = {}  # stream -> tables at rest

    def sample(self, seeds, hops, exclude=None, times=None):
        """Sample all hops of a batch."""
        if times is not None:
            return self._sample_pairs(seeds, hops, exclude, times)
        task = self.task
        resting = self.tables.setdefault(torch.cuda.current_stream(seeds.device) if seeds.is_cuda else None, [])
        try:
            table = resting.pop()  # atomic, as append is
        except IndexError:
            table = task.indices.new_full((self.num_nodes,), self.num_nodes)
        numbers = torch.arange(seeds.numel(), dtype=seeds.dtype, device=seeds.device)
        table.scatter_(0, seeds.long(), numbers)
        if not torch.equal(table.index_select(0, seeds), numbers):
            return None  # and the table, which is not clean, is not used again
        src, blocks = seeds, []
        for hop in hops:
            indptr, edges, local = self._edges(src.long(), hop, exclude)
            if hop.relabel:
                src, local = self._relabel(table, src, local.long())
            blocks.append((indptr.to(seeds.dtype), local, src, edges if task.edge_ids else None, None))
        resting.append(table.index_fill_(0, src.long(), self.num_nodes))
        return blocks

    def _sample_pairs(self, seeds, hops, exclude, times):
        """The same for nodes at times [S], of which T are distinct: a pair is node + V * (number of its time)."""
        values, number = times.unique(return_inverse=True)  # [T], [S]
        pairs, blocks = seeds + self.num_nodes * number, []
        if pairs.unique().numel() < pairs.numel():
            return None
        for hop in hops:
            nodes, numbers = pairs % self.num_nodes, pairs // self.num_nodes
            indptr, edges, local = self._edges(nodes, hop, exclude, values[numbers])
            if hop.relabel:
                taken_at = numbers.repeat_interleave(indptr.diff(), output_size=edges.numel())
                pairs, local = _number_by_appearance(pairs, local + self.num_nodes * taken_at)
            src, src_times = (pairs % self.num_nodes).to(seeds.dtype), values[pairs // self.num_nodes]
            ids = edges if self.task.edge_ids else None
            blocks.append((indptr.to(seeds.dtype), local.to(seeds.dtype), src, ids, src_times))
        return blocks

    def _edges(self, v, hop, exclude, times=None):
        """What nodes v int64 [S] take -> block indptr [S+1], edges int64 [E], their nodes [E]."""
        indptr, edges = self._pick(v, hop.k, hop.key, exclude, times)
        nodes = self.task.indices.index_select(0, edges)
        if not nodes.is_cuda and _outside(nodes, self.num_nodes) is not None:
            raise IndexError("a node in indices")
        return indptr, edges, nodes

    def _pick(self, v, k, key, exclude, times):
        """Choose edges of nodes v int64 [S] -> block indptr [S+1], positions in the graph's indices int64 [E]."""
        start = self.task.indptr.index_select(0, v)
        end = self.task.indptr.index_select(0, v + 1)
        degree = end - start
        if not v.is_cuda and bool(((start < 0) | (degree < 0) | (end > self.task.indices.numel())).any()):
            raise IndexError("a list in indptr")  # on a GPU every look is a wait, and damage an assertion there
        if times is not None:
            degree = _number_before(self.task.edge_times, start, degree, times, self.task.strict)
        gap = None
        if exclude is not None:
            gap = torch.searchsorted(exclude, start)  # [S] the first excluded edge of a list
            degree = degree - (torch.searchsorted(exclude, start + degree) - gap)
        if self.task.rule in ("labor", "weighted"):  # every edge of every list is looked at
            indptr, places = _prefix_sum(degree), _expand(start, degree)
            row = torch.arange(v.numel(), device=v.device).repeat_interleave(degree, output_size=places.numel())
            edges = places if gap is None else _past_excluded(places, exclude, gap[row])
            if self.task.rule == "labor":
                kept = self._keep_labor(edges, degree[row], k, key)
            else:
                kept = self._keep_heaviest(edges, row, places - start[row], v[row], k, key)
            return _prefix_sum(kept)[indptr], edges[kept]
        if self.task.rule == "replace":
            counts, draws = torch.where(degree > 0, k, 0), degree > 0
        else:
            counts = degree if k < 0 else degree.clamp(max=k)
            draws = degree > counts
        if self.task.rule == "latest":
            start, draws = start + degree - counts, torch.zeros_like(draws)
        indptr, edges = _prefix_sum(counts), _expand(start, counts)
        rows = draws.nonzero().squeeze(1)  # [R] the others take their whole list
        if rows.numel():
            j = torch.arange(k, device=v.device).unsqueeze(1)  # [k, 1]
            bits, d = _draw(key, v[rows], j), degree[rows]  # [k, R], [R]
            pick = (bits * d) >> 32 if self.task.rule == "replace" else _floyd(bits, d)
            edges.index_put_((indptr[rows] + j,), start[rows] + pick)
        if gap is not None:
            edges = _past_excluded(edges, exclude, gap.repeat_interleave(counts, output_size=edges.numel()))
        return indptr, edges

    def _keep_labor(self, edges, degree, k, key):
        """LABOR-0: mask [E] of the edges whose source's own draw falls under k / degree."""
        if k < 0:
            return torch.ones_like(edges, dtype=torch.bool)
        return _draw(key, self.task.indices[edges].long(), 0) * degree <= k << 32

    def _keep_heaviest(self, edges, row, position, v, k, key):
        """Efraimidis-Spirakis: mask [E] of the k largest log(uniform) / weight of each row."""
        weight = self.task.weights[edges].double()
        if k < 0:
            return weight > 0
        uniform = (_draw(key, v, position).double() + 0.5) * 2.0**-32
        order = torch.argsort(uniform.log_().div_(weight), descending=True, stable=True)
        order = order[torch.argsort(row[order], stable=True)]  # by row, the largest first; rows keep their extent
        rank = torch.empty_like(position).scatter_(0, order, position)
        return (rank < k) & (weight > 0)

    def _relabel(self, table, src, ids):
        """Number the new nodes among ids int64 [E] by first appearance -> src_nodes [N], positions in it [E]."""
        local = table.index_select(0, ids)
        new = (local == self.num_nodes).nonzero().squeeze(1)  # edges to nodes that have no number yet
        ids = ids[new]
        claim = torch.arange(-ids.numel(), 0, dtype=src.dtype, device=src.device)  # below every number: they stay apart
        table.scatter_reduce_(0, ids, claim, "amin")  # the first edge wins, whatever the order of writes
        winners = ids[table.index_select(0, ids) == claim]
        numbers = torch.arange(src.numel(), src.numel() + winners.numel(), dtype=src.dtype, device=src.device)
        table.scatter_(0, winners, numbers)
        local[new] = table.index_select(0, ids)
        return torch.cat([src, winners.to(src.dtype)]), local


def _prefix_sum(counts):  # [S] -> [S+1], starting at 0
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0)])


def _expand(start, counts):  # start, start+1, ..., start+count-1 of every row, one after the other: [E]
    shift, E = start - counts.cumsum(0) + counts, int(counts.sum())  # told E, repeat_interleave on a GPU does not wait
    return shift.repeat_interleave(counts, output_size=E) + torch.arange(E, device=start.device)


def _number_before(edge_times, start, degree, times, strict):
    """How many edges of each list [S] come by its time [S], or, if strict, before it: all binary searches at once."""
    at, left = start, degree  # the edges before `at` do; of the next `left` it is not known
    for _ in range(int(degree.max()).bit_length() if degree.numel() else 0):
        half = left // 2
        found = edge_times.index_select(0, (at + half).clamp(max=edge_times.numel() - 1))
        early = ((found < times) if strict else (found <= times)) & (left > 0)
        at, left = torch.where(early, at + half + 1, at), torch.where(early, left - half - 1, half)
    return at - start


def _number_by_appearance(src, ends):
    """Number what is in ends [E] but not in src [N], which is distinct, behind that -> all of it, numbers of ends."""
    values, inverse = torch.cat([src, ends]).unique(return_inverse=True)
    place = torch.arange(inverse.numel(), device=src.device)
    first = torch.full_like(values, inverse.numel()).scatter_reduce_(0, inverse, place, "amin")
    order = first.argsort()
    number = torch.empty_like(order).scatter_(0, order, place[: order.numel()])
    return values[order], number[inverse[src.numel() :]]


def _past_excluded(edges, exclude, gap):
    """Edges [E], counted from the start of their lists without the excluded ones [X] -> the edges they are.

    gap [E] numbers the first excluded edge of the list. One lies before an edge if, less those before it, it comes
    first; that difference ascends too.
    """
    behind = exclude - torch.arange(exclude.numel(), device=exclude.device)
    return edges + torch.searchsorted(behind, edges - gap, right=True) - gap


def _floyd(bits, degree):
    """Floyd's algorithm (CACM 30(9), 1987): k distinct positions below degree for every row, from bits [k, R]."""
    last = degree - bits.shape[0] + torch.arange(bits.shape[0], device=bits.device).unsqueeze(1)  # [k, R] d - k + j
    pick = (bits * (last + 1)) >> 32
    for j in range(1, pick.shape[0]):
        pick[j] = torch.where((pick[:j] == pick[j]).any(0), last[j], pick[j])
    return pick
