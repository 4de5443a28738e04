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
Batch, Part, Input, Outcome, State = (
    build.struct_type(build.read_source("batch.h"), name)
    for name in ("batch_t", "part_t", "input_t", "outcome_t", "state_t")
)
HEAD = ctypes.sizeof(Input) // 8  # int64 numbers of an input_t


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
    source = build.read_source(
        "aggregate.cu",
        ID=IDS[ids],
        IN=(ROWS | CODES)[features.dtype],
        OUT=ROWS[out.dtype],
        VEC=vec,
        LANES=lanes(out, vec),
        K=k,
    )
    return source, vec


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
        if not self.spec.num_nodes and seeds.numel():
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
            frame.memory = frame.edges = frame.times = None  # now the blocks' memory
            # the GPU is done with the frame, so the next batch may be on any stream
            self.resting.append(frame)
        return blocks

    def degrees(self, nodes, times):
        """Count the edges that nodes [n] see at times int64 [n], without types -> int64 [n]; 0 for a damaged list."""
        degrees = torch.empty_like(times)
        self.kernels.run(
            "degrees_at",
            len(times),
            {"b": self.graph, "n": len(times), "nodes": nodes, "times": times, "degrees": degrees},
        )
        return degrees

    def shapes(self, S):
        """Plan room for a batch of S seeds -> (source nodes by hop [L + 1], the seeds first; edges by hop [L])."""
        spec = self.spec
        num_edges = spec.indices.numel()
        rows = [S]
        places = []
        for k, most in zip(self.fanouts, self.most):
            # at another time, or for another seed, a node has its edges again
            room = num_edges * (rows[-1] if spec.pairing else 1)
            if spec.rule.repeats:
                room = rows[-1] * k
            bounded = k > 0 and spec.rule.bounded
            if bounded:
                room = min(room, rows[-1] * k)
            if not bounded or room > ROOM:
                usual = k if k > 0 else num_edges / max(spec.num_nodes, 1)
                room = min(room, most or min(int(1.25 * usual * rows[-1]) + 4096, ROOM))
            places.append(max(room, 1))
            sources = rows[-1] + places[-1]
            rows.append(sources if spec.pairing else min(sources, spec.num_nodes))
        # slots have to fit an int, too
        if S + sum(places) >= (NONE // 4 if spec.pairing else NONE):
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
            for array in (*frame.memory, frame.edges, frame.times):
                if array is not None:
                    array.zero_()  # so that ids in the padding are valid node and edge ids
        return frame


class Frame:
    """The memory and the launches that sample a batch, for one batch at a time.

    Attributes:
        host_inputs: int64, pinned: an input_t, the seeds and, where edges have times, those of the seeds.
        input: its copy on the GPU. step: int64 [1] of this.
        results: int64 on the GPU, an outcome_t and the state_t of each hop, and one more. num_dst: int64 [L + 1] of this,
            destinations of each hop, then the sources of the outermost one.
        read, host_results: pinned copy of results, as a tensor and as a struct.
        memory: of the batch's blocks: their sources, their indices, the sources' seeds, the offsets of each hop.
    """

    def __init__(self, backend):
        spec, L = backend.spec, len(backend.fanouts)
        self.backend = backend
        self.ids = spec.indices
        self.kernels = backend.kernels
        self.shape = None  # arguments of `fit`
        self.kept = {}
        self.listing = None
        self.base = 0
        self.parts = [Part(hop, k) for hop, k in enumerate(backend.fanouts)]
        self.table = self.ids.new_empty(0 if spec.pairing else spec.num_nodes, dtype=torch.int32)
        self.pairs = self.ids.new_empty(0, dtype=torch.int64)
        states = ("states", State * (L + 1))
        kind = type("results", (ctypes.Structure,), {"_fields_": [*Outcome._fields_, states]})
        self.results = self.ids.new_zeros(ctypes.sizeof(kind) // 8, dtype=torch.int64)
        self.read = self._pinned(len(self.results))
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

    def _pinned(self, n):
        """Allocate n int64 zeros in pinned memory."""
        return torch.zeros(n, dtype=torch.int64, device="cpu", pin_memory=self.ids.is_cuda)

    def _room(self, name, n, dtype=torch.int32):
        """Return memory of n or more values, zero at first, that is kept for the next batches."""
        kept = self.kept.get(name)
        if kept is None or kept.numel() < n:
            self.kept[name] = kept = torch.zeros(n + n // 8, dtype=dtype, device=self.ids.device)
        return kept

    def fit(self, rows, places, relabel_outer, excludes):
        """Allocate working memory for rows source nodes and places edges, see `Backend.shapes`; prepare launches."""
        shape = rows, places, relabel_outer, excludes
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
        build.fill(b, **{name: self._room(name, n) for name, n in room.items()})
        build.fill(b, excluded=self._room("excluded", excludes, torch.int64), excludes=excludes)
        if spec.rule.column is not None:
            build.fill(b, best=self._room("best", self.positions, torch.float64))
        lengths = [n // 64 + n // 4096 + 2 for pair in zip(rows, words) for n in pair]
        num_sums = sum(lengths)
        sums = self._room("sums", num_sums, torch.int64)
        sums_of = iter(sums[:num_sums].split(lengths))
        for hop, part in enumerate(self.parts[:hops]):
            build.fill(
                part,
                relabel=relabel_outer or hop + 1 < len(self.parts),
                places=places[hop],
                words=words[hop],
                first=first[hop],
                row_sums=next(sums_of),
                word_sums=next(sums_of),
            )
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
        size = HEAD + (3 * S if spec.timed else S)
        self.host_inputs = self._pinned(size)
        self.input = self.ids.new_zeros(size, dtype=torch.int64)
        at = Input.step.offset // 8
        self.step = self.input[at : at + 1]
        self.header = Input.from_address(self.host_inputs.data_ptr())
        seeds = self.input[HEAD:]
        build.fill(b, input=self.input, seeds=seeds)
        if spec.timed:
            build.fill(b, groups=None if spec.disjoint else seeds[S:], times=seeds[2 * S :])
        self.sums = {"sums": sums, "num_sums": num_sums}
        self.steps = list(self._steps(hops))

    def _steps(self, hops):
        """Yield (launch, number of threads) in order."""
        parts = self.parts[:hops]
        yield self._begin()
        for part, following in zip(parts, [*parts[1:], None]):
            prepare = functools.partial(
                self.kernels.prepare,
                b=self.batch,
                part=part,
                next=following or part,
                counts=int(self.counted and following is not None),
            )
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
        finish = self.kernels.prepare(
            "finish", b=self.batch, hops=hops, start=parts[0].first, end=end, **self.sums
        )
        yield finish, max(end, self.sums["num_sums"])

    def _begin(self):
        b = self.batch
        part = self.parts[0]
        hops = len(self.parts)
        threads = max(part.rows * max(b.label_bytes, 1), hops, b.num_sizes)
        begin = self.kernels.prepare(
            "begin", b=b, part=part, hops=hops, counts=int(self.counted), threads=threads
        )
        return begin, threads

    def _in_registers(self, k):
        return self.counted and 0 < k <= REGISTERS[-1]

    def make_blocks(self):
        """Allocate memory for the blocks of a batch."""
        rows, places, *_ = self.shape
        spec = self.backend.spec
        parts = self.parts[: len(places)]
        nodes = max(rows[0], rows[sum(part.relabel for part in parts)])
        sizes = [
            nodes,
            self.positions,
            nodes * spec.disjoint,
            *(n + 1 for n in rows[: len(places)]),
        ]
        self.memory = self.ids.new_empty(sum(sizes)).split(sizes)
        src, local, src_seed, *offsets = self.memory
        self.edges = self.times = None
        if spec.edge_ids or not all(self._in_registers(part.k) for part in parts):
            self.edges = self.ids.new_empty(self.positions, dtype=torch.int64)
        if spec.timed:
            self.times = self.ids.new_empty(nodes, dtype=torch.int64)
        build.fill(
            self.batch,
            src=src,
            local=local,
            edges=self.edges,
            src_times=self.times,
            src_seed=src_seed if spec.disjoint else None,
        )
        for part, of in zip(parts, offsets):
            build.fill(part, offsets=of)

    def cut(self):
        """Return the blocks of a finished batch, from the seeds outward."""
        rows = [state.num_dst for state in self.host_results.states]
        return self._blocks(rows, [state.num_edges for state in self.host_results.states])

    @property
    def blocks(self):
        """The blocks with their padding: indptr [rows + 1], indices [places], src_nodes [rows of the next hop].

        Rows beyond the destinations have no edges; in the padding, indices is -1 and src_nodes some valid node id.
        """
        rows, places, *_ = self.shape
        return self._blocks(rows, places)

    def _blocks(self, rows, places):
        """Make blocks with these numbers of destinations, the last of them sources, and of edges."""
        spec = self.backend.spec
        src, local, src_seed, *offsets = self.memory
        blocks = []
        for part, of, S, N, E in zip(self.parts, offsets, rows, rows[1:], places):
            N = N if part.relabel else S
            blocks.append(
                spec.block(
                    indptr=of[: S + 1],
                    indices=local.narrow(0, part.first, E),
                    src_nodes=src[:N],
                    edge_ids=self.edges.narrow(0, part.first, E) if spec.edge_ids else None,
                    src_times=self.times[:N] if spec.timed else None,
                    src_seed=src_seed[:N] if spec.disjoint else None,
                )
            )
        return blocks

    def fill(self, seeds, step, exclude=None, times=None):
        """Set seeds, step, excluded edges and times of the next batch; the last one, and its copies, must be done.
        exclude: int64 [X] edges, in any order; more than there is room for set FULL."""
        if self.base < self.positions:  # the table is used up, or new
            self.table.fill_(NONE)
            self.base = NONE
        self.base -= self.positions
        S = seeds.numel()
        spec = self.backend.spec
        build.fill(
            self.header,
            step=step,
            num_seeds=S,
            offset=self.base,
            num_excluded=0 if exclude is None else len(exclude),
            key_step=step // spec.rule.steps,
        )
        if exclude is not None:
            edges = exclude.sort()[0]
            # of equal edges all but one become an edge after all others, which is in no row
            edges[1:].masked_fill_(edges[1:] == edges[:-1], self.ids.numel())
            room = self.kept["excluded"][: min(len(edges), self.batch.excludes)]
            room.copy_(edges.sort()[0][: len(room)])
        self.input_size = len(self.host_inputs)
        given = self.host_inputs[HEAD:]
        if seeds.is_cuda:
            self.input_size = HEAD
            given = self.input[HEAD:]
        if times is not None:
            times = times.to(given.device).contiguous()
            room = self.parts[0].rows
            if not spec.disjoint:
                values = times.sort()[0]
                given[room:][:S].copy_(torch.searchsorted(values, times))
                times = values
            given[2 * room :][:S].copy_(times)
        given[:S].copy_(seeds)

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
            launch = kernels.prepare(
                "pick_aggregate",
                b=self.batch,
                part=part,
                width=features.shape[1] // vec,
                **self.aggregated,
            )
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
        sources = [part.next_rows for part in self.parts[:n]]
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
