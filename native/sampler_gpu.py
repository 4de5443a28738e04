"""The CUDA backend of sampler.py: kernels (sampler.cu), and one host synchronization per batch.

A batch of three hops is eleven launches, nine where the outermost hop keeps global ids:

    begin    seeds take the first positions; the edges of the batch take the next ones, hop by hop; labels are looked up
    pick     (one thread per row) draw edges, read their nodes; each edge bids its position for its node, in a table [V]:
             the smallest wins (atomicMin), which is the node's first appearance, whatever the order of threads
    mark     (a warp per 32 edges) mark the edges that won
    number   nodes whose edge won are the next source nodes, numbered in the order of positions
    finish   every edge of the batch reads the number of its node, and counts as one of its source's edges

Where the edges of each source are wanted, a prefix sum over the sources of all hops (torch's) and `list_hops` put them into
lists; `Lists` of kernels.py orders these.

Where the degree does not determine a row's count (LABOR, weights, excluded edges, times, types), or neighbourhoods are
disjoint, each hop also launches `count` before `pick`. There, and for fanouts above 64 or -1, `pick` only chooses edges, and
`claim` reads their nodes and bids. Prefix sums take no extra pass: a thread that writes a count also adds it to the sum of 64 counts, the last of these
to come adds theirs to the sum of 4,096, and a prefix is the sum of some 200 numbers. Positions are offset downward from
batch to batch: values that earlier batches left in the table are larger than any bid of this one, so nothing needs clearing.

If edges have times, a source is a pair of a node and a time; if neighbourhoods are disjoint, of a node and a seed. Pairs
bid in a hash table, in which each claims a slot by atomicCAS; the slot depends on the order of threads, the winner does not.

All shapes follow from the number of seeds: room for the most edges possible, or, where that is unknown or too much
(fanout -1, LABOR), for somewhat more than batches needed so far; a batch that does not fit says so and is made again.
Sizes, the step and edges to exclude are read from GPU memory. So the same launches make every batch, and a CUDA graph can
hold them (with `excludes`, room for excluded edges, `fill` takes edges of every batch):

    rows, places = backend.shapes(1024)
    frame = backend.frame(rows[:3], places[:2])      # of two hops: blocks and sizes stay in place
    frame.aggregate(features, x)          # the third hop in one kernel: neighbours drawn and averaged, never written
    with torch.cuda.graph(graph):
        frame.start()
    frame.fill(seeds, step)
    graph.replay()
    frame.status                          # not 0 after the replay: make the batch by `sample` instead
"""

import ctypes
import functools
from itertools import accumulate
from typing import NamedTuple

import torch

from . import build
from .kernels import CODES, IDS
from .kernels import TYPES as ROWS

ROOM = 1 << 24  # edges of a hop up to which the worst case is allocated
NONE = 2**31 - 64  # empty entry of the table: above any position, and + 32 still fits an int
REPEATED, UNKNOWN, FULL, DAMAGED = 1, 2, 4, 8  # bits of Frame.status
REGISTERS = (8, 16, 32, 64)  # each has a kernel for fanouts up to it, with the picks in registers
AGGREGATED = 48  # largest fanout of the outermost hop in one kernel, which also holds nodes and rows in registers
TYPES = {torch.uint8: "unsigned char", torch.int16: "unsigned short"}  # of edges
# as batch.h declares them
STRUCTS = ("batch_t", "part_t", "input_t", "outcome_t", "state_t")
Batch, Part, Input, Outcome, State = (
    build.struct_type(build.read_source("batch.h"), name) for name in STRUCTS
)


def in_registers(k):
    """Return whether pick_aggregate takes fanout k, which is text if it is by type."""
    return k in range(1, AGGREGATED + 1)


def aggregate_source(ids, k, features, out):
    """Make pick_aggregate for fanout k, features [V, F] and out [rows, 2F] -> (CUDA source, columns per load)."""
    # of 8 results of 4 bytes a compiler may make one access of 32 bytes
    aligned = not (features.data_ptr() | out.data_ptr()) % 32
    # 16 bytes a load, of codes 8: more would take too many registers
    widest = min(16 // features.element_size(), 8)
    fits = (v for v in (8, 4) if v <= widest and not features.shape[1] % v)
    vec = next(fits, 1) if aligned else 1
    defines = {
        "ID": IDS[ids],
        "IN": (ROWS | CODES)[features.dtype],
        "OUT": ROWS[out.dtype],
        "VEC": vec,
        "LANES": lanes(out, vec),
        "K": k,
    }
    return build.read_source("aggregate.cu", **defines), vec


def lanes(out, vec):
    """Return the number of threads for a row of out [rows, 2F] in pick_aggregate: each loads vec columns twice.

    A row's threads all draw its neighbours, so fewer threads draw less; but a thread's loads wait for its loads before.
    Measured on an H200, 100 float32 columns: 223 us with 5 threads and five loads each, 159 with 8 and four, 142 with 13
    and two, 153 with 25 and one.
    """
    loads = out.shape[1] // 2 // vec
    return -(-loads // 2)


def load(spec, fanouts, seed):
    """Make a Backend for a graph that a GPU can read; None, after one warning, if kernels cannot be compiled."""
    compiled = functools.partial(build.load_cuda, device=spec.indices.device)
    backend = Backend(spec, fanouts, seed, compiled)
    return backend if backend.kernels else None


class Backend:
    """Samples batches on a GPU. Concurrent calls, on different streams, do not wait for each other: each has its own
    `Frame`, which takes 4 bytes per node of the graph.

    Args:
        spec: `Law` of sampler.py. fanouts: list of k, from the seeds outward. seed: int.
        compiled: function (name, CUDA source) -> build.Kernels or None.
    """

    def __init__(self, spec, fanouts, seed, compiled):
        rule = spec.rule
        if rule.column is not None:
            rule = rule._replace(column=rule.column.double())
        self.spec = spec._replace(rule=rule)
        self.fanouts = fanouts
        self.seed = seed
        self.compiled = compiled
        defines = {"ID": IDS[spec.indices.dtype], "WEIGHT": "double"}
        if spec.split:
            defines["TYPE"] = TYPES[spec.split.types.dtype]
        self.kernels = compiled("sampler", build.read_source("sampler.cu", rule.header, **defines))
        # for kernels that need no frame
        self.outcome = spec.indices.new_zeros(ctypes.sizeof(Outcome) // 8, dtype=torch.int64)
        self.graph = build.fill(Batch(), outcome=self.outcome, **build.law_fields(self.spec))
        self.num_nodes = spec.num_nodes
        self.timed = spec.timed
        # edges to allocate for each hop that once lacked room: what it wanted, and a quarter more
        self.most = [0] * len(fanouts)
        self.resting = []  # idle frames; pop and append are atomic

    def counts(self, excludes):
        """Return whether a node's degree tells how many of its edges are drawn; excludes: some may be left out."""
        spec = self.spec
        return spec.rule.counted and not (excludes or spec.cuts or spec.split or spec.pairing)

    def aggregates(self, excludes):
        """Return whether one kernel can draw and average the outermost hop, see `Frame.aggregate`."""
        return self.counts(excludes) and in_registers(self.fanouts[-1])

    def sample(self, seeds, step, relabel_outer=True, exclude=None, times=None):
        """Sample a batch -> a Block for each hop, from the seeds outward, in memory of the current stream that the
        blocks share; None if a seed is not a node or is repeated.

        Args:
            seeds: int32 or int64 [S], on the GPU or the CPU, pinned or not. relabel_outer: False leaves global ids in
                the outermost hop. exclude: int64 [X] edges, or None.
            times: int64 [S], if edges have times.
        """
        if not self.num_nodes and seeds.numel():
            return None
        with self.kernels.current():
            try:
                frame = self.resting.pop()
            except IndexError:
                frame = Frame(self)
            excludes = 0 if exclude is None else len(exclude)
            # a hop's need of room is known once the hops before it fit
            for _ in range(len(self.fanouts) + 2):
                frame.fit(*self.shapes(seeds.numel()), relabel_outer, excludes)
                frame.make_blocks()
                frame.fill(seeds, step, exclude, times)
                frame.start()
                self.kernels.wait()
                status = frame.status
                if status & DAMAGED:
                    raise IndexError("the graph is damaged: an offset or a node id is out of range")
                if status != FULL:
                    break
                for hop, (wanted, part) in enumerate(zip(frame.wanted, frame.parts)):
                    if wanted > part.places:
                        self.most[hop] = max(self.most[hop], wanted + wanted // 4)
            else:
                raise RuntimeError(
                    f"{seeds.numel()} seeds ask for ever more room, at last {frame.wanted} edges a "
                    "hop: use NeighborSampler(backend='torch')"
                )
            blocks = None if status else frame.cut()
            frame.memory = frame.edges = frame.times = frame.src_seed = (
                None  # now the blocks' memory
            )
            # the GPU is done with the frame, so the next batch may be on any stream
            self.resting.append(frame)
        return blocks

    def degrees(self, nodes, times):
        """Count the edges that nodes [n] see at times int64 [n], without types -> int64 [n]; 0 for a damaged list."""
        degrees = torch.empty_like(times)
        values = {"b": self.graph, "n": len(times), "nodes": nodes, "times": times}
        self.kernels.run("degrees_at", len(times), {**values, "degrees": degrees})
        return degrees

    def shapes(self, S):
        """Plan room for a batch of S seeds -> (source nodes by hop [L + 1], the seeds first; edges by hop [L])."""
        num_edges = self.spec.indices.numel()
        rows = [S]
        places = []
        for k, most in zip(self.fanouts, self.most):
            # at another time, or for another seed, a node has its edges again
            again = rows[-1] if self.spec.pairing else 1
            room = rows[-1] * k if self.spec.rule.repeats else num_edges * again
            bounded = k > 0 and self.spec.rule.bounded
            if bounded:
                room = min(room, rows[-1] * k)
            if not bounded or room > ROOM:
                usual = k if k > 0 else num_edges / max(self.num_nodes, 1)
                room = min(room, most or min(int(1.25 * usual * rows[-1]) + 4096, ROOM))
            places.append(max(room, 1))
            sources = rows[-1] + places[-1]
            rows.append(sources if self.spec.pairing else min(sources, self.num_nodes))
        if S + sum(places) >= (
            NONE // 4 if self.spec.pairing else NONE
        ):  # slots have to fit an int, too
            raise ValueError(
                f"a batch of up to {sum(places)} edges is too large; use smaller batches"
            )
        return rows, places

    def frame(self, rows, places, relabel_outer=True, excludes=0):
        """Make a Frame with blocks at fixed addresses, for the len(places) hops next to the seeds, with room for source
        nodes rows [hops + 1], the seeds first, and for edges places [hops] of each hop: see `shapes`. excludes: room for
        edges to exclude."""
        with self.kernels.current():
            frame = Frame(self)
            frame.fit(rows, places, relabel_outer, excludes)
            frame.make_blocks()
            frame.memory.zero_()  # so that ids in the padding are valid node and edge ids
            for memory in (frame.edges, frame.times):
                if memory is not None:
                    memory.zero_()
        return frame


class Shape(NamedTuple):
    """What the launches of a Frame depend on, beside the graph."""

    rows: list  # room for source nodes by hop [hops + 1], the seeds first
    places: list  # room for edges by hop [hops]
    relabel_outer: bool
    excludes: int  # room for excluded edges


class Frame:
    """The memory and the launches that sample a batch, for one batch at a time.

    Attributes:
        host_inputs: int64, pinned: an input_t, the seeds and, where edges have times, those of the seeds.
        input: its copy on the GPU. step: int64 [1] of this.
        results: int64 on the GPU, an outcome_t and the state_t of each hop, and one more. num_dst: int64 [L + 1] of this,
            destinations of each hop, then the sources of the outermost one.
        read, host_results: pinned copy of results, as a tensor and as a struct.
        memory: the memory of the batch's blocks.
    """

    def __init__(self, backend):
        spec, L = backend.spec, len(backend.fanouts)
        self.backend = backend
        self.ids = spec.indices
        self.kernels = backend.kernels
        self.shape = None
        self.kept = {}
        self.listing = None
        self.base = 0
        self.parts = [Part(hop, k) for hop, k in enumerate(backend.fanouts)]
        slots = 0 if spec.pairing else backend.num_nodes
        self.table = self.ids.new_empty(slots, dtype=torch.int32)
        self.pairs = self.ids.new_empty(0, dtype=torch.int64)
        states = ("states", State * (L + 1))
        kind = type("results", (ctypes.Structure,), {"_fields_": [*Outcome._fields_, states]})
        self.results = self._integers(ctypes.sizeof(kind) // 8)
        self.read = self._integers(len(self.results), pinned=True)
        self.host_results = kind.from_address(self.read.data_ptr())
        states = self.results[kind.states.offset // 8 :].view(L + 1, -1)
        self.num_dst = states[:, State.num_dst.offset // 8]
        for part, state in zip(self.parts, states):
            part.state = state.data_ptr()
        self.batch = Batch(one_draw=spec.rule.one_draw, seed=backend.seed & (2**64 - 1))
        build.fill(
            self.batch,
            outcome=self.results,
            states=states,
            table=self.table,
            **build.law_fields(spec),
        )

    def _integers(self, n, pinned=False):
        """Allocate n int64 zeros, on the GPU or in pinned memory."""
        device = "cpu" if pinned else self.ids.device
        pinned = pinned and self.ids.is_cuda
        return torch.zeros(n, dtype=torch.int64, device=device, pin_memory=pinned)

    def _room(self, name, n, dtype=torch.int32):
        """Return a pointer to memory of n values, zero at first, that is kept for the next batches."""
        kept = self.kept.get(name)
        if kept is None or kept.numel() < n:
            self.kept[name] = kept = torch.zeros(n + n // 8, dtype=dtype, device=self.ids.device)
        return kept.data_ptr()

    def fit(self, rows, places, relabel_outer, excludes):
        """Allocate working memory for rows source nodes and places edges, see `Backend.shapes`; prepare launches."""
        shape = Shape(rows, places, relabel_outer, excludes)
        if self.shape == shape:
            return
        self.shape = shape
        S = rows[0]
        hops = len(places)
        spec, b = self.backend.spec, self.batch
        self.counted = self.backend.counts(excludes)
        words = [-(-n // 32) for n in places]
        first = list(accumulate(places, initial=S))
        self.positions = first[-1]
        room = {"number": self.positions, "count": max(rows), "won": max(words), "wins": max(words)}
        if spec.pairing:
            room["group"] = max(rows)
        for name, n in room.items():
            setattr(b, name, self._room(name, n))
        b.excluded = self._room("excluded", excludes, torch.int64)
        b.excludes = excludes
        if spec.rule.column is not None:
            b.best = self._room("best", self.positions, torch.float64)
        lengths = [n // 64 + n // 4096 + 2 for pair in zip(rows, words) for n in pair]
        *sums, num_sums = accumulate(lengths, initial=0)
        pointer = self._room("sums", num_sums, torch.int64)
        for hop, part in enumerate(self.parts[:hops]):
            part.relabel = relabel_outer or hop + 1 < len(self.parts)
            part.places = places[hop]
            part.words = words[hop]
            part.first = first[hop]
            part.row_sums = pointer + 8 * sums[2 * hop]
            part.word_sums = pointer + 8 * sums[2 * hop + 1]
        for part, n, sources in zip(self.parts, rows, [*rows[1:], 0]):
            part.rows = n
            part.next_rows = sources
        if spec.pairing:
            b.slots = 1 << (2 * self.positions).bit_length()
            if self.pairs.numel() < b.slots:
                self.pairs = self.pairs.new_empty(b.slots)
                self.table = self.table.new_empty(b.slots)
                self.base = 0
                build.fill(b, pairs=self.pairs, table=self.table)
        self.head = ctypes.sizeof(Input) // 8
        size = self.head + (3 * S if self.backend.timed else S)
        self.host_inputs = self._integers(size, pinned=True)
        self.input = self._integers(size)
        at = Input.step.offset // 8
        self.step = self.input[at : at + 1]
        self.header = Input.from_address(self.host_inputs.data_ptr())
        seeds = self.input[self.head :]
        build.fill(b, input=self.input, seeds=seeds)
        if self.backend.timed:
            groups = None if spec.disjoint else seeds[S:]
            build.fill(b, groups=groups, times=seeds[2 * S :])
        self.sums = {"sums": pointer, "num_sums": num_sums}
        self.steps = list(self._steps(hops))

    def _steps(self, hops):
        """Yield (launch, number of threads) in order."""
        parts = self.parts[:hops]
        yield self._begin()
        for part, following in zip(parts, [*parts[1:], None]):
            counts = int(self.counted and following is not None)
            values = {"b": self.batch, "part": part, "next": following or part, "counts": counts}
            prepare = functools.partial(self.kernels.prepare, **values)
            if not self.counted:
                yield prepare("count"), part.rows
            if self._in_registers(part.k):
                yield prepare(f"pick_{next(k for k in REGISTERS if k >= part.k)}"), part.rows + 1
            else:
                yield prepare("pick"), part.rows + 1
                yield prepare("claim"), part.places
            if part.relabel:
                yield prepare("mark"), 32 * part.words
                yield prepare("number"), max(32 * part.words, part.rows)
        hops = sum(part.relabel for part in parts)
        end = parts[hops].first if hops < len(parts) else self.positions
        given = {"b": self.batch, "hops": hops, "start": parts[0].first, "end": end, **self.sums}
        yield self.kernels.prepare("finish", **given), max(end, self.sums["num_sums"])

    def _begin(self):
        b = self.batch
        part = self.parts[0]
        hops = len(self.parts)
        threads = max(part.rows * max(b.label_bytes, 1), hops, b.num_sizes)
        given = {"b": b, "part": part, "hops": hops, "counts": int(self.counted)}
        return self.kernels.prepare("begin", **given, threads=threads), threads

    def _in_registers(self, k):
        return self.counted and 0 < k <= REGISTERS[-1]

    def make_blocks(self):
        """Allocate memory for the blocks of a batch."""
        rows, places, *_ = self.shape
        spec = self.backend.spec
        parts = self.parts[: len(places)]
        # `memory` has src, then local, then the offsets of each hop, then src_seed
        self.local = max(rows[0], rows[sum(part.relabel for part in parts)])
        sizes = (n + 1 for n in rows[: len(places)])
        self.offsets = list(accumulate(sizes, initial=self.local + self.positions))
        end = self.offsets.pop()
        self.memory = self.ids.new_empty(end + self.local * spec.disjoint)
        self.src_seed = self.memory[end:] if spec.disjoint else None
        self.edges = None
        self.times = None
        if spec.edge_ids or not all(self._in_registers(part.k) for part in parts):
            self.edges = self.ids.new_empty(self.positions, dtype=torch.int64)
        if self.backend.timed:
            self.times = self.ids.new_empty(self.local, dtype=torch.int64)
        build.fill(
            self.batch,
            src=self.memory,
            local=self.memory[self.local :],
            edges=self.edges,
            src_times=self.times,
            src_seed=self.src_seed,
        )
        for part, at in zip(parts, self.offsets):
            build.fill(part, offsets=self.memory[at:])

    def cut(self):
        """Return the blocks of a finished batch, from the seeds outward."""
        rows = [state.num_dst for state in self.host_results.states]
        return self._blocks(rows, [state.num_edges for state in self.host_results.states])

    @property
    def blocks(self):
        """The blocks with their padding: indptr [rows + 1], indices [places], src_nodes [rows of the next hop].

        Rows beyond the destinations have no edges; in the padding, indices is -1 and src_nodes some valid node id.
        """
        return self._blocks(self.shape.rows, self.shape.places)

    def _blocks(self, rows, places):
        """Make blocks with these numbers of destinations, the last of them sources, and of edges."""
        memory, spec = self.memory, self.backend.spec
        blocks = []
        for part, at, S, N, E in zip(self.parts, self.offsets, rows, rows[1:], places):
            N = N if part.relabel else S
            block = spec.block(
                indptr=memory.narrow(0, at, S + 1),
                indices=memory.narrow(0, self.local + part.first, E),
                src_nodes=memory.narrow(0, 0, N),
                edge_ids=self.edges.narrow(0, part.first, E) if spec.edge_ids else None,
                src_times=self.times.narrow(0, 0, N) if self.backend.timed else None,
                src_seed=self.src_seed.narrow(0, 0, N) if spec.disjoint else None,
            )
            blocks.append(block)
        return blocks

    def fill(self, seeds, step, exclude=None, times=None):
        """Set seeds, step, excluded edges and times of the next batch; the last one, and its copies, must be done.
        exclude: int64 [X] edges, in any order; more than there is room for set FULL."""
        num_excluded = 0
        if exclude is not None:
            num_excluded = len(exclude)
            self._exclude(exclude)
        if self.base < self.positions:  # the table is used up, or new
            self.table.fill_(NONE)
            self.base = NONE
        self.base -= self.positions
        S = seeds.numel()
        header = self.header
        header.step = step
        header.num_seeds = S
        header.offset = self.base
        header.num_excluded = num_excluded
        header.key_step = step // self.backend.spec.rule.steps
        self.input_size = len(self.host_inputs)
        given = self.host_inputs[self.head :]
        if seeds.is_cuda:
            self.input_size = self.head
            given = self.input[self.head :]
        if times is not None:
            times = times.to(given.device).contiguous()
            room = self.shape.rows[0]
            if not self.backend.spec.disjoint:
                values = times.sort()[0]
                given[room:][:S].copy_(torch.searchsorted(values, times))
                times = values
            given[2 * room :][:S].copy_(times)
        given[:S].copy_(seeds)

    def _exclude(self, edges):
        """Put edges [X], in any order, into the frame's memory as far as there is room, without waiting for the GPU."""
        edges = edges.sort()[0]
        # of equal edges all but one become an edge after all others, which is in no row
        edges[1:].masked_fill_(edges[1:] == edges[:-1], self.ids.numel())
        room = self.kept["excluded"][: min(len(edges), self.shape.excludes)]
        room.copy_(edges.sort()[0][: len(room)])

    def start(self):
        """Start sampling on the current stream. A CUDA graph can capture this, for seeds from the same device as when it
        was captured."""
        self.input[: self.input_size].copy_(self.host_inputs[: self.input_size], non_blocking=True)
        if self.backend.spec.pairing:
            self.pairs.fill_(-1)
        stream = self.kernels.stream()
        for launch, threads in self.steps:
            launch(threads, stream)
        if self.listing:
            sizes, starts, _, launch, threads = self.listing
            torch.cumsum(sizes, 0, dtype=torch.int32, out=starts)
            launch(threads, stream)
        self.read.copy_(self.results, non_blocking=True)

    @property
    def status(self):
        """What is wrong with a finished batch: the bits REPEATED, UNKNOWN, FULL, DAMAGED, or 0."""
        return self.host_results.status | (DAMAGED if self.host_results.damaged else 0)

    @property
    def wanted(self):
        """Number of edges that each hop would have with enough room."""
        return [state.wanted for state in self.host_results.states[:-1]]

    def aggregate(self, features, out, scale=None):
        """Make `start` also sample and aggregate the next hop, in one kernel: 1 to AGGREGATED uniform draws, with or
        without replacement -> False, after a warning, if the kernel cannot be compiled.

        Args:
            features: float32 or bfloat16 [V, F], or int8 codes with a `scale`, see `FeatureRing`.
            out: float32 or bfloat16 [rows, 2F], with room for the hop's destinations: own row and mean of the
                neighbours' rows, summed in edge order as by `self_and_mean` of native/layers.py; zero in the
                padding.
        """
        part, spec = self.parts[len(self.shape[1])], self.backend.spec
        text, vec = aggregate_source(spec.indices.dtype, part.k, features, out)
        kernels = self.backend.compiled("outermost-hop", text)
        if kernels:
            # their memory is read and written at every start
            self.aggregated = {"features": features, "steps": scale, "out": out}
            given = {"b": self.batch, "part": part, "width": features.shape[1] // vec}
            launch = kernels.prepare("pick_aggregate", **given, **self.aggregated)
            self.steps.append((launch, lanes(out, vec) * part.rows))
        return kernels is not None

    def look_up(self, labels, y):
        """Make `start` also look up y [rows, ...], the integer labels [V, ...] of the seeds, -1 in the padding."""
        self.labels = labels
        build.fill(self.batch, labels=labels, y=y, label_bytes=y.stride(0) * y.element_size())
        self.steps[0] = self._begin()

    def list_edges(self, lists):
        """Make `start` also list the edges of the first hops by source, but not in order, in the `Lists` of
        native/kernels.py of their blocks, which get memory of the frame."""
        b = self.batch
        n = max(hop for hop, block_lists in enumerate(lists) if block_lists) + 1
        outer = self.parts[n - 1]
        end = outer.first + outer.places
        sources = self.shape.rows[1 : n + 1]
        ints = functools.partial(self.ids.new_zeros, dtype=torch.int32)
        sizes, starts = ints((2, sum(sources) + 1))
        dst, slot, *arrays = by_position = ints((6, end))
        first = accumulate(sources, initial=0)
        for part, N, at, block_lists in zip(self.parts, sources, first, lists):
            places = slice(part.first, part.first + part.places)
            build.fill(part, sources=at, edge_dst=dst[places])
            if block_lists:
                span = slice(at, at + N + 1)
                block_lists.use(dst[places], sizes[span], starts[span], arrays)
        build.fill(b, size=sizes[1:], slot=slot, listed=n, num_sizes=sum(sources))
        self.steps[0] = self._begin()
        launch = self.kernels.prepare("list_hops", b=b, end=end, start=starts, list=arrays[0])
        self.listing = sizes, starts, by_position, launch, end
