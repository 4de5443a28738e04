"""Neighbour sampling fused with block construction: seeds + CSC graph -> one `Block` a hop.

Copy this file into your own code, with the folder native/ for speed and extras/ for more than uniform draws. Without
native/, after a warning, torch operations replace the C code and the CUDA kernels.

    sampler = NeighborSampler(indptr, indices, fanouts=[15, 10, 5], seed=0)
    blocks = sampler.sample(seeds, step=0)     # blocks[0] outermost hop ... blocks[-1] has the seeds
    x = features[blocks[0].src_nodes]          # input rows; then feed the blocks to the layers

The graph has V nodes and M edges, CSC over in-edges: the in-neighbours of v are indices[indptr[v]:indptr[v+1]]. A block
has S destinations, N sources and E edges. Fanouts and hops are counted from the seeds: hop i is blocks[-1 - i].

Samples depend only on (random seed, step, hop, node), through a counter-based generator (see `random_bits`): all
backends but "dgl" return the same bits, for any number of threads and ranks and any prefetch depth.

A hop is five passes over flat arrays: degrees; prefix sum (the block's indptr); picks (Floyd's algorithm: k draws, however
long the list); gather of the picked node ids; relabelling, which the outermost hop, the largest, can do without.

A `Law` says how neighbours are drawn: the *rule* takes edges of a list; *cuts* leave the edges that a destination sees; a
*split* makes several lists of one, as by type; by a *pairing* a source is more than its node. extras/ has a file for each.
"""

import warnings
from collections.abc import Callable
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

try:
    from native import sampler_cpu, sampler_gpu
except ImportError:
    sampler_cpu = None
try:
    from extras import elsewhere, extra, with_options

    __getattr__ = elsewhere(__name__)
except ImportError:

    def extra(*ask):
        """Refuse what takes extras/."""
        raise ImportError("copy the folder extras/ beside sampler.py (in a package: from .extras)")

    with_options = extra


BACKENDS = ("auto", "native", "torch", "dgl")
MOST_EDGES = (1 << 31) - 1  # of a node, as in native/: a draw has 32 bits
DAMAGED = "the graph is damaged: an offset in indptr or a node id in indices is out of range"
DAMAGED += f", or a node has over {MOST_EDGES:,} edges"


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
        return extra(".dgl").to_dgl(self)

    def to_pyg(self):
        """Convert for PyG -> (edge_index [2, E] int64, e_id [E], which is edge_ids, or None, size (N, S)): conv((x, x[:S]),
        edge_index)."""
        dst = torch.repeat_interleave(self.indptr.diff().long())
        return torch.stack([self.indices.long(), dst]), self.edge_ids, (self.num_src, self.num_dst)


class DamagedGraph(IndexError):
    """An offset in `indptr` or a node id in `indices`, read while sampling, is out of range."""


class Lists(NamedTuple):
    """R lists of edges to draw from: neighbour lists or parts of them."""

    rows: Tensor | slice  # int64 [R] index of a list's destination among those of the hop
    v: Tensor  # int64 [R] destinations
    start: Tensor  # int64 [R] position of a list's first edge in the graph's indices
    degree: Tensor  # int64 [R] number of edges
    k: int | Tensor  # fanout, or int64 [R]; MOST_EDGES: all
    key: int | Tensor  # of the hop, or int64 [R]
    skip: Callable | None = None  # (edges [E], list of each [E]) -> the same, past edges left out

    def bits(self, lists, v, j):
        """Draw j of nodes v with the keys of these lists, see `random_bits`."""
        return random_bits(of(self.key, lists), v, j)


class Rule(NamedTuple):
    """A sampling rule: how edges of a list are taken with torch operations, and what else depends on the rule. It draws
    positions in lists, or picks edges itself; one that does neither takes the last k of a list."""

    name: str
    number: int = 0  # in positions.h
    help: str = ""  # of --sampler
    draw: Callable | None = None  # (lists, their numbers [R], j [k, 1]) -> positions in them [k, R]
    pick: Callable | None = (
        None  # (law, lists) -> offsets [R+1] of the edges, their positions in indices [E]
    )
    needs: str | None = None  # option of NeighborSampler without which it cannot be used
    column: Tensor | None = None  # [M] that it reads
    header: str = "positions"  # of native/rules/, the same in C and CUDA
    bounded: bool = True  # no more than k edges of a list
    repeats: bool = False  # k edges even of a shorter list, some of them repeatedly
    # the degree tells how many edges of a list are taken, and `choose` of native/batch.h can draw them
    counted: bool = False
    # draws are the source's: the hops of a batch (one_draw), or so many consecutive steps, can share them
    by_source: bool = False
    one_draw: bool = False
    steps: int = 1


def _floyd(lists, rows, j):
    """Floyd's algorithm (CACM 30(9), 1987): k distinct positions below degree for every row."""
    bits = lists.bits(rows, lists.v[rows], j)
    last = lists.degree[rows] - of(lists.k, rows) + j  # [k, R]
    pick = (bits * (last + 1)) >> 32
    for j in range(1, len(pick)):
        pick[j] = torch.where((pick[:j] == pick[j]).any(0), last[j], pick[j])
    return pick


def _anywhere(lists, rows, j):
    """Draw k positions below degree for every row."""
    return (lists.bits(rows, lists.v[rows], j) * lists.degree[rows]) >> 32


UNIFORM = Rule("uniform", draw=_floyd, counted=True)
REPLACE = Rule("with replacement", 1, draw=_anywhere, repeats=True, counted=True)


class Law(NamedTuple):
    """What a backend is made from: the graph, contiguous and on one device, and how neighbours are drawn."""

    indptr: Tensor  # int64 [V+1]
    indices: Tensor  # int32 or int64 [M]
    fanouts: list  # k of each hop, or with a split the most of all lists of a node; -1: no limit
    rule: Rule = UNIFORM
    cuts: tuple = ()  # (lists, Sources) -> lists of the edges that their destinations see
    split: Callable | None = None  # (lists, hop) -> several lists for each
    pairing: type | None = None  # a subclass of Sources, where a source is more than a node
    disjoint: bool = False  # no two seeds share a source
    label: Callable | None = None  # (block) -> block with what is known of its edges
    sorted_by: dict = {}  # columns by which each list ascends, ties of one by the next; not checked here
    native: dict = {}  # further fields of spec_t of native/rule.h
    options: tuple = ()  # names of those of NeighborSampler that were given
    edge_ids: bool = False  # whether blocks have edge_ids
    threads: int | None = None  # of a call in C; None: torch.get_num_threads(), at most 4

    block = Block  # what backends return, one for each hop
    num_nodes = property(lambda self: self.indptr.numel() - 1, doc="V, the number of nodes.")
    timed = property(lambda self: "edge_times" in self.native, doc="Whether seeds have times.")


class Hop(NamedTuple):
    """Fanout and random key of one hop of a batch."""

    index: int  # counted from the seeds
    k: int  # fanout, -1: all
    key: int  # from hop_key()
    relabel: bool  # False: indices keep global ids, src_nodes has only the destinations


class NeighborSampler:
    """Sample the in-neighbourhood of seed nodes, one `Block` a hop, by GraphSAGE (arXiv 1706.02216) or another law.

    Args:
        indptr: int64 [V+1], indices: int32 or int64 [M]: the graph, on one device; below 2^31 edges a node.
        fanouts: neighbours sampled per node, from the seeds outward (15,10,5: 15 for each seed, 10 for each of those,
            then 5; DGL lists them in the opposite order); -1 takes all.
        replace: draw with replacement. method: "uniform", or "labor", "weighted" or "latest", see extras/.
        seed: any int; the same seed and step give the same blocks.
        edge_ids: also return the position of each edge in `indices`; for its number in edges that a person gave see
            `from_edge_index` of loader.py and `GraphStore.given_edges`.
        backend: "native" (C on CPU, CUDA on GPU, compiled at first use), "torch" (any device), "dgl" (DGL's operators
            and random numbers), or "auto": native where available, else torch; the attribute says which.
        check: validate the graph once, here; without, `sample` raises DamagedGraph when it reads a bad offset or id.
        threads: of one `sample` call of the C backend; default torch.get_num_threads(), at most 4.
        options: those of `OPTIONS` of extras/, such as weights, edge_times and edge_type: `law` of each file explains them.

    Raises ValueError, TypeError for invalid arguments; ImportError for an option whose file of extras/ is missing.
    """

    def __init__(
        self,
        indptr,
        indices,
        fanouts,
        *,
        replace=False,
        method=UNIFORM.name,
        seed=0,
        edge_ids=False,
        backend="auto",
        check=True,
        threads=None,
        **options,
    ):
        if backend not in BACKENDS:
            raise ValueError(f"backend {backend!r} is unknown; use {', '.join(BACKENDS)}")
        check_array("indptr", indptr, "int64 [V+1]", indptr)
        check_array("indices", indices, "int32 or int64 [M]", indptr)
        if check:
            _check_graph(indptr, indices)
        fanouts = fanout_list(fanouts)
        law = Law(
            indptr.contiguous(),
            indices.contiguous(),
            fanouts,
            rule=REPLACE if replace else UNIFORM,
            edge_ids=edge_ids,
            threads=threads,
        )
        method = None if method == UNIFORM.name else method
        if method or options or any(isinstance(k, list) for k in fanouts):
            law = with_options(law, method, options, check)
        _check_fanouts(fanouts, law.rule)
        self.spec = law
        self.fanouts = law.fanouts
        self.seed = index(seed)
        self.indptr = law.indptr
        self.indices = law.indices
        self.timed = law.timed
        self.edge_type = law.label and law.label.edge_type
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
            engine = extra(".dgl").Backend(self.spec)
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
            exclude: edges to leave out in every hop: their positions in `indices`, int32 or int64 [X], in any order; or
                a mask, bool [M], which costs O(M). On a GPU the host has to synchronize for this.
            relabel_outer: False leaves global ids in blocks[0].indices, for a model that aggregates the first layer
                straight from the feature table; blocks[0].src_nodes then has only the destinations.

        Returns a Block for each fanout, blocks[0] of the outermost hop; blocks[i].src_nodes starts with
        blocks[i+1].src_nodes, and new sources are numbered by first appearance.
        Raises TypeError, IndexError, ValueError: seeds, times or edges of a wrong dtype, out of range, missing, unexpected or
        repeated. DamagedGraph, a subclass of IndexError: not on a GPU by backend "torch".
        """
        check_ids("seeds", seeds, "node ids")
        law = self.spec
        step = index(step)
        device = law.indices.device
        on_gpu = self.backend == "native" and law.indices.is_cuda
        if law.timed or times is not None:
            times = extra(".times").times_of(law, seeds, times)
        if exclude is not None:  # the CUDA kernels' backend takes ids in any order
            exclude = extra(".exclude").edge_set(exclude, law.indices, ordered=not on_gpu)
        if on_gpu:  # ids are checked and keys computed there
            work = (seeds, step, relabel_outer, exclude, times)
        else:
            check_range("seeds", seeds, law.num_nodes, "node")
            hops = []
            for i, k in enumerate(self.fanouts):
                key = hop_key(self.seed, step // law.rule.steps, 0 if law.rule.one_draw else i)
                hops.append(Hop(i, k, key, relabel_outer or i + 1 < len(self.fanouts)))
            times = times if times is None else times.to(device).contiguous()
            work = (seeds.to(device, law.indices.dtype).contiguous(), hops, exclude, times)
        try:
            blocks = self.engine.sample(*work)
        except IndexError as error:  # seeds were checked: the bad index came from the graph
            raise DamagedGraph(DAMAGED) from error
        if blocks is None:
            check_range("seeds", seeds, law.num_nodes, "node")
            columns = [ids.cpu().long() for ids in (seeds, times) if ids is not None]
            values, counts = torch.stack(columns).unique(dim=1, return_counts=True)
            which = " at time ".join(map(str, values[:, counts > 1][:, 0].tolist()))
            raise ValueError(f"seeds contains node {which} more than once; they must be distinct")
        blocks = blocks[::-1]
        return blocks if law.label is None else [*map(law.label, blocks)]


# ---- Argument checks.


def fanout_list(fanouts):
    """Convert fanouts to a list with, for each hop, an int or a list of int, one per type; TypeError for other numbers."""
    try:
        return [[*map(index, k)] if isinstance(k, list | tuple) else index(k) for k in fanouts]
    except TypeError as error:
        raise TypeError(
            f"fanouts is {fanouts!r}: a list of whole numbers, one for each hop, is needed"
        ) from error


def _check_fanouts(fanouts, rule):
    numbers = []
    for k in fanouts:  # 0 is for one type among several
        numbers += [k or -2] if isinstance(k, int) else k or [-2]
    if min(numbers, default=-2) < -1 or max(numbers) >= 1 << 31:
        raise ValueError(
            f"fanouts {fanouts}: give one number for each hop, positive or -1 (all), below 2^31"
        )
    if rule.repeats and -1 in numbers:
        raise ValueError(f"fanouts {fanouts}: -1 (all) is not for replace=True")


def check_array(name, array, form, like, length=None):
    """Raise TypeError unless an array has a form such as "int32 or int64 [M]", the device of `like` and this length."""
    if not isinstance(array, Tensor):
        raise TypeError(
            f"{name} is a {type(array).__name__}, a tensor is needed: torch.as_tensor({name})"
        )
    if array.device != like.device:
        raise TypeError(f"{name} is on {array.device}, and indptr on {like.device}")
    length = max(array.numel(), "V+1" in form) if length is None else length
    if str(array.dtype)[6:] not in form.replace(",", "").split() or array.shape != (length,):
        raise TypeError(f"{name} must be {form}, not {kind(array)}")


def _check_graph(indptr, indices):
    """Raise ValueError unless arrays form a CSC graph."""
    V = indptr.numel() - 1
    M = indices.numel()
    ends = indptr[[0, -1]].tolist()
    if ends != [0, M] or bool((indptr[1:] < indptr[:-1]).any()):
        raise ValueError(f"indptr runs from {ends[0]} to {ends[1]}; it must rise from 0 to {M}")
    if M > MOST_EDGES and (most := int(indptr.diff().max())) > MOST_EDGES:
        raise ValueError(f"indptr has a node with {most:,} edges; the limit is {MOST_EDGES:,}")
    if (bad := outside(indices, V)) is not None:
        raise ValueError(f"indices contains {bad}; the {V} nodes of indptr are counted from 0")


def check_ids(name, ids, units):
    """Raise TypeError unless ids are integers of one dimension."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
        raise TypeError(f"{name} must be a 1-D int32 or int64 tensor of {units}, not {kind(ids)}")


def kind(x):
    """Describe a tensor, or anything else, for a message."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def check_range(name, ids, n, kind):
    """Raise IndexError for an id that is not in 0 .. n-1."""
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


def signed(key):
    """Reinterpret an unsigned 64-bit int as signed, to fit into int64; a tensor is unchanged."""
    return key if isinstance(key, Tensor) else key - (key >> 63 << 64)


def of(values, rows):
    """Return what these rows have, of one value for all or a tensor of values."""
    return values[rows] if isinstance(values, Tensor) else values


def random_bits(key, v, j, bits=32):
    """Draw j of node v -> random bits, int64. v and j: int64 tensors that broadcast; key: 64 bits or such a tensor."""
    z = mix(mix(v ^ signed(key)) ^ j)
    return z >> (64 - bits) & (1 << bits) - 1


# ---- Sampling as array programs, on any device.


class TorchBackend:
    """Plain torch operations, each pass over all destinations at once. The backends of native/ have the same `sample`,
    except that of native/sampler_gpu.py, which takes (seeds, step, relabel_outer, exclude, times)."""

    def __init__(self, spec):
        self.spec = spec

    def sample(self, seeds, hops, exclude, times):
        """Sample each `Hop` -> a Block for each, from the seeds outward; None if a seed is repeated.
        seeds: [S], dtype of indices. exclude: `Cut` of extras/exclude.py or None. times: int64 [S] or None."""
        law = self.spec
        sources = (law.pairing or Sources)(law, seeds, times)
        if sources.keys.unique().numel() < seeds.numel():
            return None
        cuts = law.cuts if exclude is None else (*law.cuts, exclude)
        blocks = []
        for hop in hops:
            lists = sources.lists(hop)
            if law.split:
                lists = law.split(lists, hop)
            indptr, edges = self._pick(cuts, sources, lists)
            if law.split:
                counts = torch.bincount(lists.rows, minlength=len(sources.nodes))
                indptr = indptr[prefix_sum(counts)]
            local = law.indices.index_select(0, edges)
            if not local.is_cuda and outside(local, law.num_nodes) is not None:
                raise IndexError("a node in indices")
            if hop.relabel:
                local = sources.number(indptr, local)
            block = Block(
                indptr=indptr.to(seeds.dtype),
                indices=local.to(seeds.dtype),
                src_nodes=sources.nodes.to(seeds.dtype),
                edge_ids=edges if law.edge_ids else None,
            )
            blocks.append(sources.labelled(block))
        return blocks

    def _pick(self, cuts, sources, lists):
        """Choose edges of `Lists` by the rule -> offsets [R+1] into them, positions in the graph's indices int64 [E]."""
        rule = self.spec.rule
        for cut in cuts:
            lists = cut(lists, sources)
        degree = lists.degree
        if rule.pick:
            return rule.pick(self.spec, lists)
        k = lists.k
        if rule.repeats:
            draws = degree > 0
            counts = torch.where(draws, k, 0)
        else:
            counts = degree.clamp(max=k)
            draws = degree > counts
        indptr = prefix_sum(counts)
        edges = expand(lists.start if rule.draw else lists.start + degree - counts, counts)
        rows = draws.nonzero().squeeze(1)  # [D] that draw; the others take their whole list
        if rule.draw and rows.numel():
            most = int(k[rows].max()) if isinstance(k, Tensor) else k
            j = torch.arange(most, device=rows.device).unsqueeze(1)  # [k, 1]
            taken = lists.start[rows] + rule.draw(lists, rows, j)  # [k, D]
            places = indptr[rows] + j
            if isinstance(k, Tensor):
                taken = taken[j < k[rows]]
                places = places[j < k[rows]]
            edges.index_put_((places,), taken)
        if lists.skip:
            edges = lists.skip(edges, torch.repeat_interleave(counts, output_size=edges.numel()))
        return indptr, edges


class Sources:
    """The source nodes of a batch, hop by hop, numbered by first appearance. A pairing is a subclass, in which the key of a
    source is more than its node."""

    def __init__(self, law, seeds, times):
        self.law = law
        self.take(seeds)

    def take(self, keys):
        """Take keys [N] as the sources."""
        self.keys = self.nodes = keys

    def reached(self, indptr, ids):
        """Return the keys of the sources of edges. ids: [E] their nodes, indptr: [S+1] the edges of each destination."""
        return ids

    def lists(self, hop):
        """Return the lists that a hop draws from."""
        law, v = self.law, self.nodes.long()
        start = law.indptr.index_select(0, v)
        end = law.indptr.index_select(0, v + 1)
        degree = end - start
        # on a GPU the check would synchronize, and a read out of range is an assertion there anyway
        if not v.is_cuda:
            bad = (start < 0) | (end < start) | (end > law.indices.numel()) | (degree > MOST_EDGES)
            if bad.any():
                raise IndexError("a list in indptr")
        k = MOST_EDGES if hop.k < 0 else hop.k
        return Lists(slice(None), v, start, degree, k, hop.key)

    def number(self, indptr, ids):
        """Append the sources of edges that are none yet -> position of each edge's among all."""
        N = self.keys.numel()
        keys = torch.cat([self.keys, self.reached(indptr, ids)])
        values, order = keys.sort(stable=True)
        begins = torch.ones_like(values, dtype=torch.bool)
        begins[1:] = values[1:] != values[:-1]
        first, group = order[begins].sort()  # where each key appears first
        number = torch.empty_like(group)
        number[group] = torch.arange(group.numel(), device=group.device)
        self.take(keys[first])
        place = torch.empty_like(order)
        place[order] = number[begins.cumsum(0) - 1]
        return place[N:]

    def labelled(self, block):
        """Add to a block what else is known of its sources."""
        return block


def prefix_sum(counts):
    """Return the sums of the first 0, 1, ... S of counts [S] -> int64 [S+1]."""
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0)])


def expand(start, counts, total=None):
    """Concatenate start, start+1, ..., start+count-1 of all rows -> [E]. total: E, if the caller has it."""
    E = int(counts.sum()) if total is None else total
    shift = start - counts.cumsum(0) + counts
    return shift.repeat_interleave(counts, output_size=E) + torch.arange(E, device=start.device)
