"""Neighbour sampling fused with block construction: seeds + CSC graph -> one `Block` a hop.

Copy this file and the folder native/ into your own code. Without native/ it works too: after a
warning, torch operations replace the C code and the CUDA kernels.

    sampler = NeighborSampler(indptr, indices, fanouts=[15, 10, 5], seed=0)
    blocks = sampler.sample(seeds, step=0)     # blocks[0] outermost hop ... blocks[-1] has the seeds
    x = features[blocks[0].src_nodes]          # input rows; then feed the blocks to the layers

Fanouts and hops are counted from the seeds, blocks the other way round: hop i is blocks[-1 - i].
The graph has V nodes and M edges, CSC over in-edges: the in-neighbours of v are
indices[indptr[v]:indptr[v+1]]. A block has S destinations, N sources and E edges.

Samples depend only on (random seed, step, hop, node), through a counter-based generator (see `random_bits`): all
backends but "dgl" return the same bits, for any number of threads and ranks and any prefetch depth. With
`disjoint=True` they also depend on the seed whose neighbourhood it is.

A hop is five passes over flat arrays, from the graph to the block without intermediate structures: degrees; prefix sum
(the block's indptr); picks (Floyd's algorithm: k draws, however long the list); gather of the picked node ids;
relabelling. Destinations need no hashing, because they are the sources of the previous hop, and the outermost hop, by
far the largest, can skip relabelling (`relabel_outer=False`). native/sampler_cpu.py says how passes overlap in C.
"""

import warnings
from collections.abc import Callable
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

try:
    from native import sampler_cpu, sampler_gpu
    from native.dgl import DGLAdapter, import_dgl  # noqa: F401  re-exported
except ImportError:
    sampler_cpu = None

BACKENDS = ("auto", "native", "torch", "dgl")
MOST_EDGES = (1 << 31) - 1  # of a node, as in native/: a draw has 32 bits
DAMAGED = "the graph is damaged: an offset in indptr or a node id in indices is out of range"
DAMAGED += f", or a node has over {MOST_EDGES:,} edges"
NO_TYPE = -2  # fanout of a type that does not exist, as in rule.h


class Block(NamedTuple):
    """One bipartite hop, destination-major (CSC): messages go from `src_nodes` to the first S of them.

    Integers have the dtype of the graph's `indices` (int32 below 2^31 nodes), `edge_ids` are int64.
    Where edges have times a source is a (node, time) pair, where neighbourhoods are disjoint a (node, seed) pair, so
    `src_nodes` may repeat a node.
    """

    indptr: Tensor  # [S+1] edges of destination s are indices[indptr[s]:indptr[s+1]]
    indices: Tensor  # [E] positions in src_nodes
    src_nodes: Tensor  # [N] global node ids; the first S are the seeds, in the order given
    edge_ids: Tensor | None = None  # [E] position of each edge in the graph's `indices`
    src_times: Tensor | None = None  # int64 [N] times of the source nodes, where edges have times
    edge_type: Tensor | None = None  # [E] the type of each edge, where edges have types
    src_seed: Tensor | None = None  # [N] position in seeds of the seed that each source belongs to

    num_src = property(lambda self: self.src_nodes.numel(), doc="N, the number of source nodes.")
    num_dst = property(lambda self: self.indptr.numel() - 1, doc="S, number of destinations.")
    num_edges = property(lambda self: self.indices.numel(), doc="E, number of edges.")

    def __repr__(self):
        return f"Block(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges})"

    def to(self, device, non_blocking=False):
        """Return the block with its tensors on `device`."""
        return Block(*(t if t is None else t.to(device, non_blocking=non_blocking) for t in self))

    def record_stream(self, stream):
        """Keep the CUDA allocator from reusing these tensors' memory before `stream` is done with them."""
        for t in self:
            if t is not None and t.is_cuda:
                t.record_stream(stream)

    def to_dgl(self):
        """Convert to a DGL block with dgl.NID set, and dgl.EID and dgl.ETYPE from edge_ids and edge_type, if any."""
        from native.dgl import to_dgl

        return to_dgl(self)

    def to_pyg(self):
        """Convert for PyG -> (edge_index [2, E] int64, e_id [E], which is edge_ids, or None, size (N, S)): conv((x, x[:S]),
        edge_index)."""
        dst = torch.repeat_interleave(self.indptr.diff().long())
        return torch.stack([self.indices.long(), dst]), self.edge_ids, (self.num_src, self.num_dst)


class DamagedGraph(IndexError):
    """An offset in `indptr` or a node id in `indices`, read while sampling, is out of range."""


class Rule(NamedTuple):
    """A sampling rule: how edges of a list are taken with torch operations, and what else depends on the rule.

    A rule draws positions, or looks at every edge and keeps some; one with neither takes the last k of the list. A
    rule for fixed positions has a `draw` that ignores its bits.
    """

    name: str
    number: int  # in native/rule.h, which has the rule for C and CUDA
    help: str = ""  # of --sampler
    draw: Callable | None = None  # (bits [k, R], degree [R]) -> positions in the lists [k, R]
    keep: Callable | None = None  # (spec, lists, edges, row, place) -> mask of the edges kept [E]
    needs: str | None = None  # argument of NeighborSampler without which it cannot be used
    bounded: bool = True  # no more than k edges of a list
    repeats: bool = False  # k edges even of a shorter list, some of them repeatedly
    # draws are the source's: the hops of a batch, or several steps, can share them
    by_source: bool = False
    # the degree tells how many edges of a list are taken, and `choose` of native/batch.h can draw them
    counted: bool = False
    in_dgl: bool = False  # native/dgl.py can draw by it


# ---- The sampling rules, also in native/rule.h.


def _floyd(bits, degree):
    """Floyd's algorithm (CACM 30(9), 1987): k distinct positions below degree for every row, from bits [k, R]."""
    j = torch.arange(bits.shape[0], device=bits.device).unsqueeze(1)
    last = degree - bits.shape[0] + j  # [k, R]
    pick = (bits * (last + 1)) >> 32
    for j in range(1, pick.shape[0]):
        pick[j] = torch.where((pick[:j] == pick[j]).any(0), last[j], pick[j])
    return pick


def _anywhere(bits, degree):
    """Draw k positions below degree for every row, from bits [k, R]."""
    return (bits * degree) >> 32


def _keep_shared(spec, lists, edges, row, place):
    """LABOR-0: one draw for each source decides for all destinations. edges: [E], row: [E] list of an edge -> mask [E]."""
    source = spec.indices[edges].long()
    draw = lists.bits(row, source, 0)
    return (draw * lists.degree[row] <= lists.k << 32) | (lists.k < 0)


def _keep_heaviest(spec, lists, edges, row, place):
    """Efraimidis-Spirakis: mask [E] of the k largest log(uniform) / weight of each list. place: [E] of an edge in it."""
    weight = spec.weights[edges].double()
    if lists.k < 0:
        return weight > 0
    uniform = (lists.bits(row, lists.v[row], place).double() + 0.5) * 2.0**-32
    order = torch.argsort(uniform.log_().div_(weight), descending=True, stable=True)
    # sort by row again, each row's largest key first
    order = order[torch.argsort(row[order], stable=True)]
    rank = torch.empty_like(place).scatter_(0, order, place)
    return (rank < lists.k) & (weight > 0)


UNIFORM = Rule("uniform", 0, draw=_floyd, counted=True, in_dgl=True)
REPLACE = Rule("with replacement", 1, draw=_anywhere, repeats=True, counted=True, in_dgl=True)
LATEST = Rule("latest", 2, "the last edges that the seed sees", needs="edge_times")
LABOR = Rule(
    "labor",
    3,
    "seeds share neighbours (arXiv 2210.13339)",
    keep=_keep_shared,
    bounded=False,
    by_source=True,
    in_dgl=True,
)
WEIGHTED = Rule("weighted", 4, "by edge weight", keep=_keep_heaviest, in_dgl=True)
SAMPLERS = {rule.name: rule for rule in (UNIFORM, LABOR, WEIGHTED, LATEST)}  # of --sampler
METHODS = [name for name, rule in SAMPLERS.items() if rule is not WEIGHTED]  # of NeighborSampler


class SamplingSpec(NamedTuple):
    """What a backend is made from: the graph, contiguous and on one device, and the sampling options."""

    indptr: Tensor  # int64 [V+1]
    indices: Tensor  # int32 or int64 [M]
    weights: Tensor | None  # float [M]
    edge_times: Tensor | None  # int64 [M], ascending in each neighbour list
    strict: bool  # only edges before the destination's time; False: also those at it
    window: int  # only edges later than the destination's time minus this; 0: all
    edge_type: Tensor | None  # uint8 or int16 [M], ascending in each list, to sample by type
    fanout_of: Tensor | None  # int64 [L, 256 or 65536] k per hop and type, NO_TYPE: no such type
    one_draw: bool  # all hops use the key of hop 0
    batch_dependency: int  # consecutive steps with the same keys
    disjoint: bool  # no two seeds share a source
    rule: Rule
    edge_ids: bool  # whether blocks have edge_ids
    threads: int | None  # of a call in C; None: torch.get_num_threads(), at most 4

    block = Block  # what backends return, one for each hop
    num_nodes = property(lambda self: self.indptr.numel() - 1, doc="V, the number of nodes.")

    @property
    def pairs(self):
        """Whether a source is a pair: of a node and its seed if disjoint, else of a node and a time."""
        return self.disjoint or self.edge_times is not None

    def law(self):
        """Return the fields of law_t of native/rule.h; the struct that they are filled into must not outlive this."""
        return {
            "indptr": self.indptr,
            "indices": self.indices,
            "weights": self.weights,
            "types": self.edge_type,
            "fanouts": self.fanout_of,
            "edge_times": self.edge_times,
            "rule": self.rule.number,
            "strict": self.strict,
            "window": self.window,
            "V": self.num_nodes,
            "M": self.indices.numel(),
        }


class Hop(NamedTuple):
    """Fanout and random key of one hop of a batch."""

    index: int  # counted from the seeds
    k: int  # fanout, -1: all; with fanouts by type `SamplingSpec.fanout_of` has them
    key: int  # from hop_key()
    relabel: bool  # False: indices keep global ids, src_nodes has only the destinations


class NeighborSampler:
    """Sample the in-neighbourhood of seed nodes, one `Block` a hop, by GraphSAGE (arXiv 1706.02216) or LABOR.

    Args:
        indptr: int64 [V+1], indices: int32 or int64 [M]: the graph, on one device; below 2^31 edges a node.
        fanouts: neighbours sampled per node, from the seeds outward (15,10,5: 15 for each seed, 10 for each of those,
            then 5); -1 takes all. DGL lists them in the opposite order. With edge types a number applies to each
            type, and a list has one number per type: [[10, 3], [5, 0]].
        replace: draw with replacement (uniform only).
        method: "uniform"; "labor" (LABOR-0, arXiv 2210.13339): k neighbours on average, so that seeds with common
            neighbours share them, which makes the outer hops smaller; "latest": the k latest by edge_times.
        layer_dependency: ("labor" only) reuse a node's random draw in all hops: fewer distinct sources in a batch.
        batch_dependency: ("labor" only) reuse it for this many consecutive steps, as GraphBolt does: fewer new sources.
        weights: float [M], in the order of `indices` as all columns here, not negative: draw without replacement with probability following the weights
            (Efraimidis-Spirakis 2006); edges of weight 0 are never taken.
        edge_times: int64 [M], ascending in each neighbour list: `sample` then takes a time for each seed, and a node
            samples only edges no later than the time of the seed that reached it. strict: only edges before that time.
            window: int above 0: only edges later than that time minus this; None: all.
        edge_type: uint8 or uint16 [M] below 2^15, ascending in each neighbour list (and edge_times within each type).
            Each type's edges are sampled as if they were the whole list, with their own random draws. by_type:
            False samples as if the edges had no types; not with edge_times. type_numbers: int64 [T], what blocks have in
            place of each type.
        disjoint: True gives each seed a neighbourhood of its own, with its own random draws, which do not depend on the
            other seeds of the batch; seeds may then repeat. `src_seed` of a block says whose each source is.
        seed: any int; the same seed and step give the same blocks.
        edge_ids: also return the position of each edge in `indices`, not its number in edges that a person gave: see
            `from_edge_index` of loader.py and `GraphStore.given_edges`.
        backend: "native" (C on CPU, CUDA on GPU, compiled at first use), "torch" (any device), "dgl" (DGL's operators
            and random numbers), or "auto": native where available, else torch.
        check: validate the graph once, here; without, `sample` raises DamagedGraph when it reads a bad offset or id.
        threads: of one `sample` call of the C backend; default torch.get_num_threads(), at most 4.

    Attributes:
        backend: name of the backend in use. engine: the backend object.

    Raises:
        ValueError, TypeError: for invalid arguments; the message names the value and what is accepted.
    """

    def __init__(
        self,
        indptr,
        indices,
        fanouts,
        *,
        replace=False,
        method=UNIFORM.name,
        layer_dependency=False,
        batch_dependency=1,
        weights=None,
        edge_times=None,
        strict=False,
        window=None,
        edge_type=None,
        by_type=True,
        type_numbers=None,
        disjoint=False,
        seed=0,
        edge_ids=False,
        backend="auto",
        check=True,
        threads=None,
    ):
        self.fanouts = fanout_list(fanouts)
        self.seed = index(seed)
        rule = _rule(replace, method, weights)
        _check_options(
            self.fanouts,
            rule,
            edge_times=edge_times,
            strict=strict,
            window=window,
            edge_type=edge_type,
            by_type=by_type,
            disjoint=disjoint,
            backend=backend,
            layer_dependency=layer_dependency,
            batch_dependency=batch_dependency,
        )
        columns = dict(weights=weights, edge_times=edge_times, edge_type=edge_type)
        _check_arrays(indptr, indices, columns)
        if check:
            _check_graph(indptr, indices, by_type=by_type, **columns)
        self.timed = edge_times is not None
        self.indptr = indptr.contiguous()
        self.indices = indices.contiguous()
        self.edge_ids = edge_ids
        self.edge_type = None if edge_type is None else _as_signed(edge_type).contiguous()
        self.type_numbers = type_numbers
        by_type = by_type and edge_type is not None
        fanout_of = None
        if by_type:
            fanout_of, self.fanouts = _fanout_of(self.fanouts, self.edge_type, check)
        self.spec = SamplingSpec(
            indptr=self.indptr,
            indices=self.indices,
            weights=None if weights is None else weights.contiguous(),
            edge_times=None if edge_times is None else edge_times.contiguous(),
            strict=bool(strict),
            window=int(window or 0),
            edge_type=self.edge_type if by_type else None,
            fanout_of=fanout_of,
            one_draw=bool(layer_dependency),
            batch_dependency=index(batch_dependency),
            disjoint=bool(disjoint),
            rule=rule,
            edge_ids=edge_ids or edge_type is not None,
            threads=threads,
        )
        self.backend = backend
        self._load()

    def __getstate__(self):  # without the engine: another process loads the compiled code itself
        return {**vars(self), "engine": None}

    def __setstate__(self, state):
        vars(self).update(state)
        self._load()

    def _load(self):
        """Make the engine of the backend; where native is unavailable that becomes torch, after a warning."""
        engine = None
        if self.backend == "dgl":
            from native.dgl import Backend

            engine = Backend(self.spec)
        elif self.backend != "torch":
            self.backend = "native"
            if sampler_cpu is None:
                warnings.warn(
                    "slower torch operations are used: copy the folder native/ beside sampler.py "
                    "(in a package: from .native)",
                    stacklevel=3,
                )
            elif self.indices.is_cuda:
                engine = sampler_gpu.load(self.spec, self.fanouts, self.seed)
            else:
                engine = sampler_cpu.load(self.spec)
        if engine is None:
            self.backend = "torch"
            engine = TorchBackend(self.spec)
        self.engine = engine

    @torch.inference_mode(False)  # blocks may be trained on, and memory serves later batches
    def sample(self, seeds, step, times=None, exclude=None, *, relabel_outer=True):
        """Sample the neighbourhood of `seeds`; thread-safe.

        Args:
            seeds: int32 or int64 [S], distinct node ids; a node may repeat with another time, or if disjoint.
            step: int, the number of the batch; it keys the random draws.
            times: int64 [S], the time of each seed; needed with edge_times, refused without.
            exclude: edges to leave out in every hop, as if the graph did not have them: their positions in `indices`,
                int32 or int64 [X], in any order; or a mask, bool [M], which costs O(M). On a GPU the host has to
                synchronize for this.
            relabel_outer: False leaves global ids in blocks[0].indices, for a model that aggregates the first layer
                straight from the feature table; blocks[0].src_nodes then has only the destinations.

        Returns:
            One Block for each fanout; blocks[0] is the outermost hop, blocks[-1] has the seeds as destinations, and
            blocks[i].src_nodes starts with blocks[i+1].src_nodes. With times a source has the time of the destination
            that sampled it, if disjoint its seed; such pairs are numbered by first appearance.

        Raises:
            TypeError, IndexError, ValueError: seeds or edges of a wrong dtype or out of range; repeated seeds; times
                missing or unexpected; exclude with backend "dgl".
            DamagedGraph: a subclass of IndexError. Backend "torch" does not check for it on a GPU.
        """
        _check_ids("seeds", seeds, "node ids")
        if times is not None and not self.timed:
            raise ValueError("times are given but the edges have none; give the sampler edge_times")
        if self.timed and _kind(times) != f"torch.int64 {list(seeds.shape)}":
            raise TypeError(
                f"times must be int64 [S={seeds.numel()}], one for each seed, as edges have times, "
                f"not {_kind(times)}"
            )
        exclude = None if exclude is None else self._edge_set(exclude)
        step = index(step)
        if self._on_gpu():
            # ids are checked and keys computed on the GPU
            work = (seeds, step, relabel_outer, exclude, times)
        else:
            _check_range("seeds", seeds, self.spec.num_nodes, "node")
            device = self.indices.device
            hops = []
            dependency = self.spec.batch_dependency
            for i, k in enumerate(self.fanouts):
                key = hop_key(self.seed, step // dependency, 0 if self.spec.one_draw else i)
                hops.append(Hop(i, k, key, relabel_outer or i + 1 < len(self.fanouts)))
            times = times if times is None else times.to(device).contiguous()
            work = (seeds.to(device, self.indices.dtype).contiguous(), hops, exclude, times)
        try:
            blocks = self.engine.sample(*work)
        except IndexError as error:  # seeds were checked: the bad index came from the graph
            raise DamagedGraph(DAMAGED) from error
        if blocks is None:
            _check_range("seeds", seeds, self.spec.num_nodes, "node")
            columns = [ids.cpu().long() for ids in (seeds, times) if ids is not None]
            values, counts = torch.stack(columns).unique(dim=1, return_counts=True)
            which = " at time ".join(map(str, values[:, counts > 1][:, 0].tolist()))
            raise ValueError(f"seeds contains node {which} more than once; they must be distinct")
        blocks = blocks[::-1]
        return blocks if self.edge_type is None else list(map(self._with_types, blocks))

    def _on_gpu(self):
        return self.backend == "native" and self.indices.is_cuda

    def _with_types(self, block):
        types = block.edge_type
        if types is None:  # the C code returns them with the block
            types = self.edge_type.index_select(0, block.edge_ids)
        types = _as_signed(types)
        if self.type_numbers is not None:
            types = self.type_numbers.to(types.device)[types.long()]
        return block._replace(edge_type=types, edge_ids=block.edge_ids if self.edge_ids else None)

    def _edge_set(self, exclude):
        """Convert edge ids or a mask to distinct ascending ids -> int64 [X] on the graph's device; None if empty. The CUDA
        kernels' backend takes ids in any order."""
        M = self.indices.numel()
        device = self.indices.device
        if isinstance(exclude, Tensor) and exclude.dtype == torch.bool and exclude.shape == (M,):
            edges = exclude.nonzero().squeeze(1).to(device)
        else:
            _check_ids("exclude", exclude, f"edge ids, or a bool mask [M={M}]")
            edges = exclude.to(device, torch.int64)
            if not self._on_gpu():
                edges = edges.unique()
            _check_range("exclude", edges, M, "edge")
        return edges if edges.numel() else None


# ---- Argument checks.


def _as_signed(types):
    """View uint16 as int16 and back, because torch has few operations for uint16; uint8 is unchanged."""
    other = {torch.uint16: torch.int16, torch.int16: torch.uint16}
    return types.view(other.get(types.dtype, types.dtype))


def fanout_list(fanouts):
    """Convert fanouts to a list with, for each hop, an int or a list of int, one per type; TypeError for other numbers."""
    try:
        return [[*map(index, k)] if isinstance(k, list | tuple) else index(k) for k in fanouts]
    except TypeError as error:
        raise TypeError(
            f"fanouts is {fanouts!r}: a list of whole numbers, one for each hop, is needed"
        ) from error


def _fanout_of(fanouts, edge_type, check):
    """Fanouts by type -> (k per type, int64 [L, 256 or 65536]; list of edges at most per destination, -1: no limit)."""
    num_types = 1
    all_lists = all(isinstance(k, list) for k in fanouts)
    if edge_type.numel() and (check or not all_lists):
        low, high = map(int, edge_type.aminmax())
        num_types = high + 1
        if low < 0:
            raise ValueError(f"edge_type has types above {(1 << 15) - 1}, which is the largest")
    lists = [k if isinstance(k, list) else [k] * num_types for k in fanouts]
    table = torch.full((len(lists), 256 if edge_type.dtype == torch.uint8 else 1 << 16), NO_TYPE)
    if not all(num_types <= len(numbers) <= table.shape[1] for numbers in lists):
        raise ValueError(
            f"fanouts {fanouts}: edge_type has {num_types} types, one number for each is needed"
        )
    for row, numbers in zip(table, lists):
        row[: len(numbers)] = torch.tensor(numbers)
    return table.to(edge_type.device), [-1 if -1 in numbers else sum(numbers) for numbers in lists]


def _rule(replace, method, weights):
    """Return the Rule that these arguments of NeighborSampler select; ValueError if they exclude each other."""
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; use one of {', '.join(METHODS)}")
    given = {
        "replace": replace,
        f"method {method!r}": method != UNIFORM.name,
        "weights": weights is not None,
    }
    chosen = [argument for argument, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} exclude each other; choose one")
    if replace:
        return REPLACE
    return SAMPLERS[method] if weights is None else WEIGHTED


def _check_options(
    fanouts,
    rule,
    *,
    edge_times,
    strict,
    window,
    edge_type,
    by_type,
    disjoint,
    backend,
    layer_dependency,
    batch_dependency,
):
    """Raise ValueError for an invalid option, or options that exclude each other."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; use {', '.join(BACKENDS)}")
    numbers = []
    for k in fanouts:  # 0 is for one type among several
        numbers += [k or NO_TYPE] if isinstance(k, int) else k or [NO_TYPE]
    if min(numbers, default=NO_TYPE) < -1 or max(numbers) >= 1 << 31:
        raise ValueError(
            f"fanouts {fanouts}: give one number for each hop, positive or -1 (all), below 2^31"
        )
    if rule.repeats and -1 in numbers:
        raise ValueError(f"fanouts {fanouts}: -1 (all) is not for replace=True")
    of_times = {"strict": strict, "window": window is not None}
    of_times[rule.name] = rule.needs == "edge_times"
    if edge_times is None and any(of_times.values()):
        raise ValueError(f"{next(filter(of_times.get, of_times))} needs edge_times")
    if window is not None and (window % 1 != 0 or not 0 < window < 1 << 63):
        raise ValueError(f"window is {window}: give an int above 0")
    if batch_dependency < 1:
        raise ValueError(f"batch_dependency is {batch_dependency}: give 1 step or more")
    dependent = "batch_dependency" if batch_dependency > 1 else None
    if layer_dependency:
        dependent = "layer_dependency"
    if dependent and not rule.by_source:
        these = " or ".join(repr(r.name) for r in SAMPLERS.values() if r.by_source)
        raise ValueError(f"{dependent} is for method {these}, not {rule.name!r}")
    lists = any(isinstance(k, list) for k in fanouts)
    if edge_type is None and (lists or not by_type):
        raise ValueError(f"fanouts {fanouts}, by_type={by_type}: fanouts by type need edge_type")
    if not by_type and (lists or edge_times is not None):
        raise ValueError(
            "by_type=False is not for fanouts by type, nor for edge_times: lists are in type order"
        )
    beyond_dgl = dict(edge_times=edge_times is not None, edge_type=edge_type is not None)
    beyond_dgl["disjoint"] = disjoint
    beyond_dgl[rule.name] = not rule.in_dgl
    lacking = dependent or next(filter(beyond_dgl.get, beyond_dgl), None)
    if backend == "dgl" and lacking:
        raise ValueError(f"backend 'dgl' has no {lacking}; use 'native' or 'torch'")


def _check_arrays(indptr, indices, columns):
    """Raise TypeError unless arrays and columns of edges have the dtypes, shapes and device of one graph."""
    M = len(indices) if isinstance(indices, Tensor) and indices.dim() else 0
    forms = dict(
        indptr="int64 [V+1]",
        indices="int32 or int64 [M]",
        weights=f"float16, bfloat16, float32 or float64 [M={M}]",
        edge_times=f"int64 [M={M}]",
        edge_type=f"uint8 or uint16 [M={M}]",
    )
    arrays = {"indptr": indptr, "indices": indices, **columns}
    for name, array in arrays.items():
        if array is None and name in columns:
            continue
        if not isinstance(array, Tensor):
            kind = type(array).__name__
            raise TypeError(f"{name} is a {kind}, a tensor is needed: torch.as_tensor({name})")
        if array.device != indptr.device:
            raise TypeError(f"{name} is on {array.device}, and indptr on {indptr.device}")
        length = max(array.numel(), 1) if name == "indptr" else M
        accepted = forms[name].replace(",", "").split()
        if str(array.dtype)[6:] not in accepted or array.shape != (length,):
            raise TypeError(f"{name} must be {forms[name]}, not {_kind(array)}")


def _check_graph(indptr, indices, *, weights, edge_times, edge_type, by_type):
    """Raise ValueError unless arrays and columns of edges, as `_check_arrays` accepts them, form a CSC graph."""
    V = indptr.numel() - 1
    M = indices.numel()
    ends = indptr[[0, -1]].tolist()
    if ends != [0, M] or bool((indptr[1:] < indptr[:-1]).any()):
        raise ValueError(f"indptr runs from {ends[0]} to {ends[1]}; it must rise from 0 to {M}")
    if M > MOST_EDGES and (most := int(indptr.diff().max())) > MOST_EDGES:
        raise ValueError(f"indptr has a node with {most:,} edges; the limit is {MOST_EDGES:,}")
    if (bad := outside(indices, V)) is not None:
        raise ValueError(f"indices contains {bad}; the {V} nodes of indptr are counted from 0")
    if weights is not None and not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise ValueError("weights contains a negative, infinite or NaN value")
    same = torch.ones(max(M - 1, 0), dtype=torch.bool, device=indptr.device)
    same[indptr[(indptr > 0) & (indptr < M)] - 1] = False  # across the border of two lists
    how = "time"
    sorted_by = dict(edge_times=edge_times)
    if edge_type is not None and by_type:
        how = "type, then time"
        sorted_by = dict(edge_type=edge_type.to(torch.int32), **sorted_by)
    for name, values in sorted_by.items():
        if values is None:
            continue
        if (drops := (same & (values[1:] < values[:-1])).nonzero()).numel():
            v = int(torch.searchsorted(indptr, drops[0] + 1, right=True)) - 1
            raise ValueError(f"{name} decreases in the list of node {v}; sort each list by {how}")
        same &= values[1:] == values[:-1]  # times ascend within a type


def _check_ids(name, ids, units):
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
        raise TypeError(f"{name} must be a 1-D int32 or int64 tensor of {units}, not {_kind(ids)}")


def _kind(x):
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _check_range(name, ids, n, kind):
    if (bad := outside(ids, n)) is not None:
        raise IndexError(f"{name} contains {bad}; {kind} ids of this graph are 0 to {n - 1}")


def outside(ids, n):
    """Return an id that is not in 0 .. n-1, or None."""
    low, high = torch.stack(ids.aminmax()).tolist() if ids.numel() else (0, -1)
    return low if low < 0 else high if high >= n else None


# ---- Random numbers: all arithmetic is modulo 2^64 with logical shifts; products of int64 tensors wrap.

_MASK = (1 << 64) - 1


def mix(z):
    """splitmix64 (Steele, Lea, Flood, OOPSLA 2014) of an int, modulo 2^64, or of an int64 tensor."""
    z = z + (0x9E3779B97F4A7C15 - (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        shifted = z >> shift
        shifted &= (1 << (64 - shift)) - 1  # logical shift: clear the copies of the sign
        shifted ^= z
        shifted *= factor - (factor >> 63 << 64)
        z = shifted
    return z if isinstance(z, Tensor) else z & _MASK


def hop_key(seed, step, hop):
    """The 64-bit key of one hop of one step; hop 0 is the hop next to the seeds."""
    return mix(mix(mix(seed & _MASK) ^ (step & _MASK)) ^ hop)


def _signed(key):
    """Reinterpret an unsigned 64-bit int as signed, to fit into int64; a tensor is unchanged."""
    return key if isinstance(key, Tensor) else key - (key >> 63 << 64)


def _key_of(key, rows):
    """Return a key for each of these rows, of one key for all or a tensor of keys."""
    return key[rows] if isinstance(key, Tensor) else key


def random_bits(key, v, j, bits=32):
    """Draw j of node v -> random bits, int64. v and j: int64 tensors that broadcast; key: 64 bits or such a tensor."""
    z = mix(mix(v ^ _signed(key)) ^ j)
    return z >> (64 - bits) & (1 << bits) - 1


# ---- Sampling as array programs, on any device.


class Lists(NamedTuple):
    """R lists of edges to draw from: neighbour lists or, of these, the edges of one type."""

    v: Tensor  # int64 [R] destinations
    start: Tensor  # int64 [R] position of a list's first edge in the graph's indices
    degree: Tensor  # int64 [R] number of edges
    k: int  # fanout, -1: all
    key: int | Tensor  # of the hop, or int64 [R]
    times: Tensor | None  # int64 [R] of the destinations, where edges have times

    def bits(self, rows, v, j):
        """Draw j of nodes v with the keys of lists `rows`, see `random_bits`."""
        return random_bits(_key_of(self.key, rows), v, j)


class TorchBackend:
    """Plain torch operations, each pass over all destinations at once. The backends of native/ have the same `sample`,
    except that of native/sampler_gpu.py, which takes (seeds, step, relabel_outer, exclude, times)."""

    def __init__(self, spec):
        self.spec = spec
        # {stream: idle tables [V] from node to local id in the batch, V: none}; a batch resets its table on its stream
        # before another batch of that stream takes it
        self.tables = {}

    def sample(self, seeds, hops, exclude, times):
        """Sample each `Hop` -> a Block for each, from the seeds outward; None if a seed is repeated.
        seeds: [S], dtype of indices. exclude: int64 [X] edge ids, ascending and distinct, or None. times: int64 [S] or
        None. If sources are pairs, src holds node + V * (position of its seed if disjoint, else index of its time among
        the batch's distinct times)."""
        V = self.spec.num_nodes
        pairs = self.spec.pairs
        disjoint = self.spec.disjoint
        dtype = seeds.dtype
        src = seeds
        values = times  # of the groups that sources are paired with
        if disjoint:
            src = seeds + V * torch.arange(seeds.numel(), device=seeds.device)
        elif pairs:
            values, number = times.unique(return_inverse=True)  # [T], [S]
            src = seeds + V * number
        if src.unique().numel() < src.numel():
            return None
        if not pairs:
            idle, table = self._number(seeds)
        blocks = []
        for hop in hops:
            at = src // V if pairs else None
            if disjoint:
                hop = hop._replace(key=mix(_signed(hop.key) ^ seeds.long()[at]))
            when = None if values is None else values[at]
            indptr, edges = self._pick((src % V if pairs else src).long(), hop, exclude, when)
            local = self.spec.indices.index_select(0, edges)
            if not local.is_cuda and outside(local, V) is not None:
                raise IndexError("a node in indices")
            if hop.relabel and not pairs:
                src, local = self._relabel(table, src, local.long())
            elif hop.relabel:
                at = at.repeat_interleave(indptr.diff(), output_size=edges.numel())
                src, local = _number_by_appearance(src, local + V * at)
            block = Block(
                indptr=indptr.to(dtype),
                indices=local.to(dtype),
                src_nodes=(src % V if pairs else src).to(dtype),
                edge_ids=edges if self.spec.edge_ids else None,
                src_times=None if values is None else values[src // V],
                src_seed=(src // V).to(dtype) if disjoint else None,
            )
            blocks.append(block)
        if not pairs:
            idle.append(table.index_fill_(0, src.long(), V))
        return blocks

    def _number(self, seeds):
        """Number the seeds in a table -> (idle tables of this stream, the table)."""
        stream = torch.cuda.current_stream(seeds.device) if seeds.is_cuda else None
        idle = self.tables.setdefault(stream, [])
        try:
            table = idle.pop()  # atomic, as append is
        except IndexError:
            V = self.spec.num_nodes
            table = self.spec.indices.new_full((V,), V)
        numbers = torch.arange(seeds.numel(), dtype=seeds.dtype, device=seeds.device)
        return idle, table.scatter_(0, seeds.long(), numbers)

    def _pick(self, v, hop, exclude, times):
        """Choose edges of nodes v int64 [S] -> block indptr [S+1], positions in the graph's indices int64 [E]."""
        spec = self.spec
        start = spec.indptr.index_select(0, v)
        end = spec.indptr.index_select(0, v + 1)
        degree = end - start
        damaged = (start < 0) | (end < start) | (end > spec.indices.numel()) | (degree > MOST_EDGES)
        # on a GPU the check would synchronize, and a read out of range is an assertion there anyway
        if not v.is_cuda and bool(damaged.any()):
            raise IndexError("a list in indptr")
        if spec.fanout_of is None:
            return self._pick_lists(Lists(v, start, degree, hop.k, hop.key, times), exclude)
        # the edges of a type are a list of their own: G lists, each with its own k and key
        places = expand(start, degree)
        row = torch.repeat_interleave(degree)
        group = (spec.edge_type.index_select(0, places).long() & 0xFFFF) + (row << 16)
        group, counts = group.unique_consecutive(return_counts=True)
        row = group >> 16
        kind = group & 0xFFFF
        first = places[counts.cumsum(0) - counts]
        ks = spec.fanout_of[hop.index, kind]
        if not v.is_cuda and bool((ks == NO_TYPE).any()):
            raise IndexError("a type that does not exist")
        keys = mix(_signed(_key_of(hop.key, row)) ^ (1 << 32) + kind)
        picked = []
        edges = []
        for k in ks.unique().tolist():
            at = (ks == k).nonzero().squeeze(1)
            by = None if times is None else times[row[at]]
            lists = Lists(v[row[at]], first[at], counts[at], k, keys[at], by)
            indptr, taken = self._pick_lists(lists, exclude)
            picked.append(at.repeat_interleave(indptr.diff(), output_size=taken.numel()))
            edges.append(taken)
        none = group.new_empty(0)
        picked, order = torch.cat([*picked, none]).sort(stable=True)
        counts = torch.bincount(row[picked], minlength=v.numel())
        return _prefix_sum(counts), torch.cat([*edges, none])[order]

    def _pick_lists(self, lists, exclude):
        """Choose edges of `Lists` by the rule -> offsets [R+1] into them, positions in the graph's indices int64 [E]."""
        spec = self.spec
        if lists.times is not None:
            start, degree = seen_at(
                spec.edge_times,
                lists.start,
                lists.degree,
                lists.times,
                strict=spec.strict,
                window=spec.window,
            )
            lists = lists._replace(start=start, degree=degree)
        gap = None  # [R] index in exclude of a list's first excluded edge
        if exclude is not None:
            gap = torch.searchsorted(exclude, lists.start)
            num_gaps = torch.searchsorted(exclude, lists.start + lists.degree) - gap
            lists = lists._replace(degree=lists.degree - num_gaps)
        if spec.rule.keep:
            return self._keep(lists, exclude, gap)
        start, degree = lists.start, lists.degree
        if spec.rule.repeats:
            draws = degree > 0
            counts = torch.where(draws, lists.k, 0)
        else:
            counts = degree if lists.k < 0 else degree.clamp(max=lists.k)
            draws = degree > counts
        if not spec.rule.draw:
            start = start + degree - counts
            draws = torch.zeros_like(draws)
        indptr = _prefix_sum(counts)
        edges = expand(start, counts)
        rows = draws.nonzero().squeeze(1)  # [D] that draw; the others take their whole list
        if rows.numel():
            j = torch.arange(lists.k, device=rows.device).unsqueeze(1)  # [k, 1]
            pick = spec.rule.draw(lists.bits(rows, lists.v[rows], j), degree[rows])  # [k, D]
            edges.index_put_((indptr[rows] + j,), start[rows] + pick)
        if gap is not None:
            gap = gap.repeat_interleave(counts, output_size=edges.numel())
            edges = _past_excluded(edges, exclude, gap)
        return indptr, edges

    def _keep(self, lists, exclude, gap):
        """`_pick_lists` by a rule that looks at every edge of every list; gap: [R] or None."""
        indptr = _prefix_sum(lists.degree)
        places = expand(lists.start, lists.degree)
        row = torch.repeat_interleave(lists.degree, output_size=places.numel())
        edges = places if gap is None else _past_excluded(places, exclude, gap[row])
        kept = self.spec.rule.keep(self.spec, lists, edges, row, places - lists.start[row])
        return _prefix_sum(kept)[indptr], edges[kept]

    def _relabel(self, table, src, ids):
        """Assign local ids to new nodes in ids int64 [E], by first appearance -> src_nodes [N], positions in it [E]."""
        like = dict(dtype=src.dtype, device=src.device)
        local = table.index_select(0, ids)
        # edges to nodes without a local id
        new = (local == self.spec.num_nodes).nonzero().squeeze(1)
        ids = ids[new]
        claim = torch.arange(-ids.numel(), 0, **like)  # negative: below every local id
        # the first edge wins, whatever the order of writes
        table.scatter_reduce_(0, ids, claim, "amin")
        winners = ids[table.index_select(0, ids) == claim]
        table.scatter_(0, winners, torch.arange(src.numel(), src.numel() + winners.numel(), **like))
        local[new] = table.index_select(0, ids)
        return torch.cat([src, winners.to(src.dtype)]), local


def _prefix_sum(counts):  # [S] -> [S+1], starting at 0
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0)])


def expand(start, counts, total=None):
    """Concatenate start, start+1, ..., start+count-1 of all rows -> [E]. total: E, if the caller has it."""
    E = int(counts.sum()) if total is None else total
    shift = start - counts.cumsum(0) + counts
    return shift.repeat_interleave(counts, output_size=E) + torch.arange(E, device=start.device)


def number_before(edge_times, start, degree, times, strict):
    """Count each list's edges no later than its time (earlier if strict), by vectorized binary search -> int64 [S]."""
    count = torch.zeros_like(degree)
    before = start - 1
    for bit in reversed(range(int(degree.max()).bit_length() if degree.numel() else 0)):
        more = count + (1 << bit)  # count them all if the last of them is early enough
        last = edge_times.index_select(0, (before + more).clamp_(max=edge_times.numel() - 1))
        early = ((last < times) if strict else (last <= times)) & (more <= degree)
        count = torch.where(early, more, count)
    return count


def seen_at(edge_times, start, degree, times, *, strict, window):
    """Cut each list [S] to the edges that a destination at time [S] may take, see `NeighborSampler` -> start, degree.
    window: 0 or None for none."""
    degree = number_before(edge_times, start, degree, times, strict)
    if not window:
        return start, degree
    since = times - window
    early = number_before(edge_times, start, degree, since, False)
    early = early.masked_fill(since > times, 0)  # `since` wrapped around: all edges are later
    return start + early, degree - early


def _number_by_appearance(src, ends):
    """Append ids of ends [E] not yet in src [N] (distinct), by first appearance -> (all ids, position of each end)."""
    values, inverse = torch.cat([src, ends]).unique(return_inverse=True)
    place = torch.arange(inverse.numel(), device=src.device)
    first = torch.full_like(values, inverse.numel()).scatter_reduce_(0, inverse, place, "amin")
    order = first.argsort()
    number = torch.empty_like(order).scatter_(0, order, place[: order.numel()])
    return values[order], number[inverse[src.numel() :]]


def _past_excluded(edges, exclude, gap):
    """Edges [E], counted without the excluded ones [X] -> their positions in indices; gap [E]: see `_pick_lists`.
    exclude[i] - i kept edges precede excluded edge i: a binary search in these gives how many excluded ones to skip."""
    kept_before = exclude - torch.arange(exclude.numel(), device=exclude.device)
    return edges + torch.searchsorted(kept_before, edges - gap, right=True) - gap
