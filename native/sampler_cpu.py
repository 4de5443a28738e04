"""The C backend of sampler.py: samples a hop and builds its block on the CPU, compiled at first use.

sampler.py has the law of sampling (in C: rule.h, rules/) and the passes of a hop: degrees, prefix sum, picks, gather, relabel.
This docstring describes when sampler.c runs each pass.

The passes are bound by memory latency, not arithmetic. A degree is a random read of `indptr`, a picked neighbour's id
one of `indices`, its number one of the hash table, and in a large graph each is a cache miss. A plain loop has one miss
in flight; these loops prefetch each cache line AHEAD edges early (`__builtin_prefetch`), so that tens of misses overlap.
Most of the speed comes from that.

Idle threads take the next chunk of ROWS destinations:

    this thread     count 0 | count 2 | prefix sum | pick 0 | relabel 0 | pick 2    | relabel 1 | relabel 2 | pick 5 ...
    another         count 1 | count 3 |            | pick 1      | pick 3      | pick 4      | pick 6      | pick 7 ...

Counting comes first: once the number of edges of each row is known, every edge has its place in the block, and
threads write without synchronization. Picking a chunk includes the gather of its ids. Relabelling is fused with it: a
chunk is relabelled while its edges are still in the cache and the other threads pick the next chunks.

One thread relabels, in the order of the edges, because the number of a new node is how many distinct nodes came before
it. Hence `src_nodes` is the same for any number of threads, and the table needs neither locks nor atomics. The price:
relabelling is somewhat less than half of the work, so a batch gains little from more than three threads, and a hop takes
MOST_THREADS by default. To use more cores, sample several batches at once, one per Python thread.
"""

import ctypes
import functools

import torch

from . import build

MOST_THREADS = 4  # on 16 cores, starting 15 threads for each hop took 2 to 4 ms, and a batch was no faster than on 2
FLAGS = ["-O3", "-march=native", "-fno-fast-math", "-fPIC", "-shared", "-pthread"]
TYPES = {
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.float32: "float",
    torch.float64: "double",
    torch.uint8: "uint8_t",
    torch.int16: "uint16_t",
}
# as sampler.c declares it
Job = build.struct_type(build.read_source("sampler.c"), "job_t")


def load(spec):
    """Make a Backend for a `sampler.Law`; None, after one warning, if the C code cannot be compiled."""
    rule = spec.rule
    defines = {"ID": TYPES[spec.indices.dtype], "HOME": "u" + TYPES[spec.indices.dtype]}
    if rule.column is not None:
        if rule.column.dtype not in TYPES:  # float16, bfloat16
            rule = rule._replace(column=rule.column.float())
        defines["WEIGHT"] = TYPES[rule.column.dtype]
    if spec.split:
        defines["TYPE"] = TYPES[spec.split.types.dtype]
    library = _library(rule.header, **defines)
    grouped = _library(rule.header, **defines, PAIRS=1) if spec.pairing else library
    spec = spec._replace(rule=rule)
    return Backend(spec, library, grouped) if library and grouped else None


@functools.cache
def _library(rule, **defines):
    return build.load_c("sampler", build.read_source("sampler.c", rule, **defines), FLAGS)


class Backend:
    """Calls the C code, for which ctypes releases the GIL. Working memory grows with the batch, not with the graph."""

    def __init__(self, spec, library, grouped):
        self.spec = spec
        self.library = library
        self.grouped = grouped  # the library for batches of several groups, see sampler.c
        self.job = build.fill(Job(), **build.law_fields(spec))
        self.idle = []  # working memory that no batch uses
        self.slots = 0  # of the table after the last batch: the next one needs about as many

    def sample(self, seeds, hops, exclude, times):
        """Sample all hops of a batch, see `sampler.TorchBackend`."""
        job = Job.from_buffer_copy(self.job)
        disjoint = self.spec.disjoint
        job.threads = self.spec.threads or min(torch.get_num_threads(), MOST_THREADS)
        if exclude is not None:
            excluded = exclude.fields(self.spec.indices.numel())  # which own their memory
            build.fill(job, **excluded)
        try:
            work = self.idle.pop()  # atomic, as append is: calls on several threads never share one
        except IndexError:
            work = WorkingMemory(seeds.dtype)
        work.library = self.library
        group = None
        if self.spec.pairing:
            times, group = self.spec.pairing.groups(seeds, times)
            if not disjoint and len(times) == 1:  # a node is one source, as without times
                group = None
        build.fill(job, times=times, seeds=seeds if disjoint else None)
        if group is not None:
            counts = group.bincount()
            work.library = self.grouped
            work.seeds_before = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            build.fill(job, seeds_before=work.seeds_before, num_groups=len(counts))
            group = group.to(seeds.dtype)
        if not work.number(seeds, group, max(self.slots, 2 * seeds.numel())):
            return None
        src = seeds
        blocks = []
        for hop in hops:
            block, group = self._hop(work, job, src, group, hop)
            src = block.src_nodes
            if times is not None:
                src_times = times.expand(src.numel()) if group is None else times[group]
                block = block._replace(src_times=src_times)
            if disjoint:
                block = block._replace(src_seed=group)
            blocks.append(block)
        self.slots = work.slots
        self.idle.append(work)
        return blocks

    def _hop(self, work, job, dst, group, hop):
        """Sample a hop for dst [S], which the table holds -> (Block, groups of its sources); the table then holds these.

        job: job_t of the batch. group: [S] of each destination, see sampler.c, or None.
        """
        spec = self.spec
        S = dst.numel()
        offsets = dst.new_empty(S + 1)
        fill = functools.partial(build.fill, job)
        pointer = ctypes.byref(job)
        fill(
            index=hop.index,
            k=hop.k,
            key=hop.key,
            S=S,
            dst=dst,
            dst_group=group,
            offsets=offsets,
            **work.rows(S),
        )
        E = self._checked(work.library.rb_count(pointer), S)
        if E >= torch.iinfo(dst.dtype).max:
            raise ValueError(f"{E} edges a hop are too many for {dst.dtype}: use smaller batches")

        local = dst.new_empty(E)
        edges = spec.indptr.new_empty(E) if spec.edge_ids else None
        edge_group = None if group is None else dst.new_empty(E)
        types = spec.split.types.new_empty(E) if spec.split else None
        fill(local=local, edges=edges, edge_type=types, edge_group=edge_group)
        src, src_group = dst, group
        if hop.relabel:
            most = min(S + E, spec.num_nodes * max(job.num_groups, 1))
            slots = (2 if group is None else 4) * most  # at most half full: searches are short
            if work.slots < slots:
                work.number(dst, group, slots)
            src = dst.new_empty(S + E + 1)
            src_group = None if group is None else dst.new_empty(S + E + 1)
            homes = dst.new_empty(E)
            fill(src=src, src_group=src_group, table=work.table, bits=work.bits, edge_home=homes)
        else:
            fill(src_group=None, table=None)
        N = self._checked(work.library.rb_pick(pointer), S)
        block = spec.block(offsets, local, src[:N], edges, edge_type=types)
        return block, None if group is None else src_group[:N]

    @staticmethod
    def _checked(result, S):
        """Return the C code's result, or raise the error that it stands for."""
        if result == -1:
            raise MemoryError(f"no memory to sample a hop of {S} nodes")
        if result < 0:
            raise IndexError("the graph is damaged")
        return result


class WorkingMemory:
    """Working memory of a batch, kept for the next one: the hash table of local ids, and four values per row.

    Attributes, set for each batch: library. seeds_before: int64 [groups + 1], how many seeds are of earlier groups.
    """

    def __init__(self, dtype):
        self.bits = 0
        self.slot_bytes = 2 * dtype.itemsize
        self.table = torch.empty(0, dtype=torch.uint8, device="cpu")  # slot_t [slots]
        self.row_scratch = self.table.new_empty(4, 0, dtype=torch.int64)

    @property
    def slots(self):
        """Number of slots of the table in use, a power of two."""
        return 1 << self.bits

    def rows(self, S):
        """Return memory for four values of each of S rows, int64 [S or more] by name."""
        if self.row_scratch.shape[1] < S:
            self.row_scratch = self.row_scratch.new_empty(4, S + S // 8)
        return dict(zip(("start", "degree", "gap", "num_gaps"), self.row_scratch))

    def number(self, nodes, group, slots):
        """Empty the table, of at least `slots` slots, and number the nodes in it from 0 -> False if one is repeated."""
        self.bits = min(max(4, (slots - 1).bit_length()), 4 * self.slot_bytes)  # the bits of a HOME
        if self.table.nbytes < self.slots * self.slot_bytes:
            self.table = self.table.new_empty(self.slots * self.slot_bytes)
            self.library.rb_huge_pages(self.table, self.table.nbytes)
        groups = (0, None) if group is None else (self.seeds_before.numel() - 1, self.seeds_before)
        return (
            self.library.rb_number(self.table, self.bits, *groups, nodes, group, nodes.numel()) < 0
        )
