"""python -m bench predict: what limits each of our kernels in a training step on an H200, and how long it takes.

No GPU is needed, but NVRTC and a disassembler: cuobjdump of a CUDA toolkit or of triton. The limits of a launch:

    bytes     as bench roofline counts them
    issue     the instructions of all warps: the SASS of the kernel with the launch's flags and null pointers as
              constants, weighted by the trips of its loops (`WORK`)
    warps     waves of warps, as many as the registers allow at a time, times what a thread does one after another:
              instructions (STALL) and reads that wait for reads (LATENCY)
    longest   the reads of the thread with the longest lists, which runs alone in the end
    L1        cache lines that a warp's loads touch where its threads read different rows; half as many of 4 bytes

The expected time is START and the root of their squares' sum. Three constants, `Rates`, are fitted to launches on an H200,
results/launches-h200.json. The error beside a prediction is that of kernels with this limit which were held out: the
constants are fitted without a third of the kernels, for each third. MB: bytes, over the share of the bandwidth that they
reach. `before`: those launches, of the code that the file names.

The table `links` is of a draw of pairs with a negative each, and of what their nodes have in common: in the graph of
--dataset or, if its edges are more than a GPU caches, in that whose links bench gpu trains on. `before`: paths through hubs.
"""

import collections
import functools
import itertools
import math
import re
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
import types
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.nn import functional as F

from bench import gpu_graph, roofline
from bench.roofline import GATHERED, GPUS, IN_ORDER, measured, step_costs, variants
from bench.tools import opened, print_table, read_json
from extras.common_neighbours import COMMON, CommonNeighbours
from extras.edge_split import Edges
from extras.paths import lanes_of
from extras.ranking import Negatives
from native import build, kernels
from run.kinds import plain_layers
from sampler import NeighborSampler, expand

BANDWIDTH = GPUS["H200"][0]
SMS, MHZ = 132, 1830
ISSUED = 4  # warp instructions a cycle of an SM
WARPS, REGISTERS = 64, 65536  # of an SM, at most
BLOCK = 8  # warps
START = 2.0  # us, what the smallest kernels take
TIMES = Path(__file__).parents[1] / "results/launches-h200.json"
GROUP = 8  # rows that a thread loads at a time, as in layers.cu
TILE = 32  # places of a hub's list that are summed first


class Rates(NamedTuple):
    """Constants of the model, fitted from these values on."""

    stall: float = 5.0  # cycles between two instructions of a warp that wait for no memory
    latency: float = 500.0  # cycles of a read
    lines: float = 0.6  # of L1, a cycle


class Counts(NamedTuple):
    """What a launch does."""

    warps: int
    resident: int  # warps of an SM
    registers: int
    bytes: float  # over the share of the bandwidth that they reach
    instructions: float  # of a thread, on average
    reads: float  # of a thread, one after another, on average
    longest: float
    lines: float  # of L1, of a warp


class Work(NamedTuple):
    """What a thread does, on average."""

    loops: tuple  # trips of each loop of the kernel, in the order of the source; of an inner loop per outer trip
    reads: float  # that wait for one another
    longest: float = 0  # the same of the thread with most of them
    lines: float = 0  # L1 lines of a warp, if loads are not coalesced
    guarded: float = 1  # share of a loop's conditional code that is run


def in_groups(edges, group=GROUP):
    """Trips for lists of edges that are read in groups, and the share of slots that are in use."""
    trips = -(-edges // group)
    return trips, edges / (trips * group)


def row_work(a, row, edge):
    """Reads of threads with a.run sources each -> mean, most."""
    rows = row + edge * a.sizes.double()
    rows = F.pad(rows, (0, -len(rows) % a.run)).view(-1, a.run).sum(1)
    return rows.mean().item(), rows.max().item()


def plain_self_and_mean(a):
    trips, used = in_groups(a.degree)
    return Work((trips,), 3 + 2 * trips, guarded=used)


def self_and_mean(a):
    trips, used = in_groups(a.degree, a.PAIR_GROUP)
    return Work((trips,), 3 + 2 * trips, guarded=used)


def self_and_mean_grad(a):
    trips, reads = list_work(a, 1, group=2)
    return Work((*run_work(a), *trips), *reads)


def run_work(a):
    """The trips of the loop over a thread's rows; that over a tile has no other."""
    return () if a.tiles else (a.run,)


def list_work(a, row, group=1):
    """A thread that sums over its sources' lists, or a hub's tile -> trips of its two loops, reads. Edges are read in
    groups; a hub's whole tiles, one less than fit into its list, are read as sums."""
    tiles = (a.sizes // TILE - 1).clamp(min=0).double()
    edges = a.sizes - TILE * tiles
    if a.tiles:  # most are of no hub and end at once
        share = tiles.sum().item() / a.N
        reads = 2 * TILE / group
        return (share, TILE), (2 + share * reads, 2 + reads)
    a.sizes = tiles / 2 + (edges / group).ceil()  # of two reads each
    pieces = (tiles + 1).mean().item()
    return (pieces, edges.mean().item() / pieces), row_work(a, row, 2)


def max_neighbours_grad(a):
    trips, reads = list_work(a, 1)
    return Work((*trips,), *reads)


def attention_source_grad(a):
    trips, reads = list_work(a, 2)
    return Work((*run_work(a), *trips), *reads, guarded=a.S / a.N)  # destinations have self-loops


def attention_target_grad(a):
    # padded lists are walked once more, to count them
    return Work((a.run, 0, a.degree + 1), a.run * (2 + a.degree + 1))


def edge_work(a, tables):
    """attention_scores and attention_weight_grad: a thread reads a head's rows, four columns a time."""
    trips = -(-a.D // 4)
    lines = 32 * (1 + 1 / (a.degree + 1))
    return Work((trips,), 2 + trips / 2, lines=trips * (lines + tables * a.K))


def softmax(a, passes):
    places = a.degree + 1
    # neighbouring threads read lists that begin 4 K (degree + 1) bytes apart
    return Work((0, *[places] * passes), 2 + passes, lines=passes * places * 32 / a.K)


def attention_sum(a):
    trips, used = in_groups(a.degree)
    return Work((trips,), 2 + 2 * trips, guarded=used)


def list_in_order(a):
    mean = (a.sizes.double() ** 2).sum().item() / a.sizes.sum().item()  # the list of an edge
    return Work((mean, 0), 4 + mean / 16, 4 + a.sizes.max().item() / 16, random(6))


def random(reads):
    """Lines of L1 that a warp touches whose threads each read 4 bytes in so many places."""
    return 16 * reads


def pick(a):
    return Work((0, 1, 1), 12, lines=random(2 + 2 * a.k) + a.k**2)


WORK = {
    "self_and_mean": self_and_mean,
    "plain_self_and_mean": plain_self_and_mean,
    "self_and_mean_grad": self_and_mean_grad,
    "relu_dropout": lambda a: Work((), 2),
    "relu_dropout_grad": lambda a: Work((), 1),
    "norm_relu": lambda a: Work((), 2),
    "norm_relu_grad": lambda a: Work((a.run,), a.run + 1),
    "column_sums": lambda a: Work((a.run,), a.run),
    "max_neighbours": lambda a: Work((a.degree,), 1 + 2 * a.degree),
    "max_neighbours_grad": max_neighbours_grad,
    "attention_scores": lambda a: edge_work(a, 1),
    "attention_weight_grad": lambda a: edge_work(a, 0),
    "attention_softmax": lambda a: softmax(a, 3),
    "attention_softmax_grad": lambda a: softmax(a, 2),
    "attention_sum": attention_sum,
    "attention_target_grad": attention_target_grad,
    "attention_source_grad": attention_source_grad,
    "gather_rows": lambda a: Work((), 2),
    "gather_codes": lambda a: Work((), 2),
    "destinations": lambda a: Work((a.degree,), 2),
    "list_sizes": lambda a: Work((), 2),
    "list_edges": lambda a: Work((), 3),
    "list_in_order": list_in_order,
    "cross_entropy": lambda a: Work((a.C, a.C, a.C / a.lanes), 5),
    "begin": lambda a: Work((), 5),
    "mark": lambda a: Work((1,), 6, lines=random(1)),
    "number": lambda a: Work((0, 1, 1), 10, lines=random(4)),
    "finish": lambda a: Work((a.hops,), 6, lines=random(3)),
    "list_hops": lambda a: Work((2,), 5, lines=random(3)),
    "pick": pick,
    "pick_aggregate": lambda a: Work(
        (a.width / a.LANES,), 4 + a.width / a.LANES * in_groups(a.k)[0]
    ),
}
FLAGS = {"whole", "relu", "drop", "wide", "word_bytes", "id_bytes", "b.spec.rule"}


def known(values):
    """Return C statements that tell the compiler a launch's flags and which of its pointers are null."""
    lines = []
    for name, value in values.items():
        if name in FLAGS and value is not None:
            lines.append(f"{name} = {value};")
        elif value is None and name != "b.spec.types":  # a graph without types lacks their TYPE
            lines.append(f"{name} = 0;")
        elif isinstance(value, tuple):
            lines.append(f"__builtin_assume({name} != 0);")
    return "".join(lines)


def alone(source, kernel):
    """Return a source without its other kernels, which take time to compile."""
    others = rf"^KERNEL (?!{kernel}\()\w+\((?:[^\n]*\}}|.*?^\}})\n"
    return re.sub(others, "", source, flags=re.MULTILINE | re.DOTALL)


def specialised(source, kernel, values):
    """Return the source of a kernel as it runs in a launch, with loops that are not unrolled by the compiler alone."""
    source = alone(source, kernel).replace("BY_TWO for", "ONE_BY_ONE for")
    body = source.index("{", source.index(f"KERNEL {kernel}(")) + 1
    source = source[:body] + known(values) + source[body:]
    kept = r"(?<!UNROLL )(?<!ONE_BY_ONE )\bfor \((?!int half|int q = 0; q < half)"
    return re.sub(kept, "ONE_BY_ONE for (", source)


def disassembler():
    """Return the path of cuobjdump; OSError without."""
    triton = Path(sysconfig.get_paths()["purelib"]) / "triton/backends/nvidia/bin/cuobjdump"
    tool = shutil.which("cuobjdump", path=f"{triton.parent}:/usr/local/cuda/bin") or shutil.which(
        "cuobjdump"
    )
    if tool is None:
        raise OSError("bench predict needs cuobjdump, of a CUDA toolkit or of triton")
    return tool


@functools.cache
def compiled(source, kernel):
    """Compile a kernel -> ([(address, instruction)], registers)."""
    module, log = build.compile_cuda(source, "sm_90", ["--ptxas-options=-v"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(module)
        file.flush()
        command = [disassembler(), "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return parse(text), int(re.search(r"Used (\d+) registers", log)[1])


def parse(text):
    """Read a disassembly -> [(address, instruction)] up to the last EXIT: slow paths of divisions follow it."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
    code = [(int(address, 16), line) for address, line in found]
    last = max(place for place, (_, line) in enumerate(code) if "EXIT" in line)
    return code[: last + 1]


def executed(kernel, code, work):
    """Count the instructions that a thread executes on average."""
    branches = []
    for address, line in code:
        if found := re.search(r"\bBRA\b.*0x([0-9a-f]+)", line):
            branches.append((address, int(found[1], 16), line.startswith("@")))
    loops = collections.defaultdict(int)  # {first instruction: last}
    for address, target, _ in branches:
        if target < address:
            loops[target] = max(loops[target], address)
    if len(loops) != len(work.loops):
        raise ValueError(f"{kernel} has {len(loops)} loops, its entry of WORK {len(work.loops)}")
    trips = {(first, loops[first]): n for first, n in zip(sorted(loops), work.loops)}
    total = 0.0
    for address, _ in code:
        around = [loop for loop in trips if loop[0] <= address <= loop[1]]
        weight = 1.0
        for loop in around:
            weight *= trips[loop]
        if around:
            first, last = max(around)
            inside = [b for b in branches if b[2] and first <= b[0] < address < b[1] <= last]
            weight *= work.guarded if inside else 1
        total += weight
    return total


class OnGpu(torch.Tensor):
    """A tensor in host memory that says it is on a GPU."""

    is_cuda = True


def searched(degree):
    """Return the reads of a binary search in lists of these lengths."""
    return (degree + 1).double().log2()


def looked_up(threads, thread, few, steps):
    """Add up what threads do of which thread[i] reads a list of few[i] nodes and, after each, `steps[i]` times what the read
    before decides -> lists, nodes and reads of a warp, where all wait for the thread with most; reads of the longest."""
    each = torch.stack([torch.ones_like(few), few, few * (1 + steps)]).double()
    sums = torch.zeros(3, threads, dtype=torch.float64).index_add_(1, thread, each)
    warps = F.pad(sums, (0, -threads % 32)).view(3, -1, 32).amax(2).mean(1)
    return *warps.tolist(), sums[2].max().item()


def link_work(common, pairs, ends):
    """What threads do with pairs int64 [P, 2] and those whose nodes' features are computed, `ends` -> {kernel: Work}."""
    edges = common.edges
    degree = edges.indptr.diff()
    lanes = lanes_of(ends.as_subclass(OnGpu))
    search = searched(degree[pairs]).mean().item()
    few, many = degree[ends].aminmax(dim=1)
    steps = searched(many) + 1
    few = (few.unsqueeze(1) + lanes - 1 - torch.arange(lanes)).flatten() // lanes  # of each thread
    threads = torch.arange(len(few))
    _, nodes, reads, longest = looked_up(len(few), threads, few, steps.repeat_interleave(lanes))
    of_common = Work((nodes, reads / nodes - 2), 6 + reads, longest, random(reads))
    u, v = ends.unbind(1)
    pair = torch.repeat_interleave(degree[u])
    place = expand(edges.indptr[u], degree[u])
    middle = edges.sources[place].long()
    thread = pair * lanes + (place - edges.indptr[u][pair]) % lanes
    kept = common.paths.weights[middle] > 0
    few, many = torch.stack([degree[middle], degree[v[pair]]])[:, kept].aminmax(dim=0)
    hops = (many / few.clamp(min=1)).log2()  # to a node of the longer list, and as many back
    lists, nodes, reads, longest = looked_up(len(ends) * lanes, thread[kept], few, 2 + 2 * hops)
    hops = (reads / nodes - 3) / 2
    return {
        "between": Work((search, search), 6 + 2 * search, lines=random(2 * search)),
        "negatives": Work((1, 1, search), 8 + search, lines=random(search)),
        "common": of_common,
        "paths": Work((lists, nodes / lists, hops, hops + 1), 8 + reads, longest, random(reads)),
    }


def link_launches(edges, count):
    """Record a draw of `count` pairs of `Edges`, with a negative each, and of their features -> [(Launch, Work)]."""
    V = len(edges.indptr) - 1
    costs = roofline.Costs(edges.indptr)
    common = CommonNeighbours(edges)
    negatives = Negatives(edges, V)
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(edges.sources), (count,), generator=generator)
    destinations = torch.searchsorted(edges.indptr, places, right=True) - 1
    pairs = torch.stack([edges.sources[places].long(), destinations], 1)
    drawn = 0, torch.arange(count), pairs, 1
    ends = torch.stack([pairs[:, :1], negatives.draw(*drawn)], 2).squeeze(1)
    ends = torch.cat([pairs, ends])

    def noted(ids, device):
        return roofline.Noted(costs, build.read_source("links.cu", ID=kernels.IDS[ids]))

    with patch.object(kernels, "load_links", noted):
        edges.ranges(pairs)
        negatives.attempts(*drawn)
        common.pair_features(ends.as_subclass(OnGpu), count=len(COMMON) + 1)
    work = link_work(common, pairs, ends)
    return [(launch, work[launch.kernel]) for launch in costs.launches]


def counts(launch, sizes):
    """Count what a launch does -> Counts. sizes: edges of each source of the launch's block, or the `Work`."""
    values = {name.removeprefix("part."): value for name, value in launch.values.items()}
    a = types.SimpleNamespace(**{"run": 1, "sizes": sizes, **values})
    if edges := values.get("indices", values.get("dst")):
        a.degree = edges[0] / (values.get("S") or 1)
    constants = re.findall(r"#define (\w*LANES|\w+_GROUP) (\d+)", launch.source)
    for constant, value in reversed(constants):  # the first definition counts
        setattr(a, constant, int(value))
    work = sizes
    if not isinstance(sizes, Work):
        work = WORK[re.sub(r"^pick_\d+$", "pick", launch.kernel)](a)
    code, _ = compiled(specialised(launch.source, launch.kernel, launch.values), launch.kernel)
    _, used = compiled(alone(launch.source, launch.kernel), launch.kernel)
    blocks = REGISTERS // (-(-used // 8) * 256) // BLOCK
    return Counts(
        warps=-(-launch.threads // 32),
        resident=min(WARPS, blocks * BLOCK),
        registers=used,
        bytes=launch.in_order / IN_ORDER + launch.gathered / GATHERED,
        instructions=executed(launch.kernel, code, work),
        reads=work.reads,
        longest=work.longest,
        lines=work.lines,
    )


def limits(c, rates):
    """Return how long each limit alone would make a launch with these Counts take -> {limit: us}."""
    waves = max(1, c.warps / (SMS * c.resident))
    warps = max(BLOCK, c.warps / SMS)  # of the fullest SM
    path = c.instructions * rates.stall + c.reads * rates.latency
    return {
        "bytes": 1e6 * c.bytes / BANDWIDTH,
        "issue": c.warps * c.instructions / (SMS * ISSUED) / MHZ,
        "warps": waves * path / MHZ,
        "longest": c.longest * rates.latency / MHZ,
        "L1": warps * c.lines / rates.lines / MHZ,
    }


def expected(times):
    """Return the time in us of a launch with these `limits`: of two that are alike neither hides the other."""
    return START + sum(us**2 for us in times.values()) ** 0.5


def error(row, rates):
    """Return the logarithm of a measured kernel's predicted time over its time. row: of `TIMES`."""
    us = sum(expected(limits(Counts(*launch), rates)) for launch in row["launches"])
    return math.log(us / row["us"])


def fitted(rows):
    """Fit the constants to measured kernels, by the sum of the errors' sizes -> Rates."""
    loss = lambda rates: sum(abs(error(row, rates)) for row in rows)  # noqa: E731
    rates = Rates()
    for step in [1.5, 1.2, 1.05, 1.01] * 6:
        for name, by in itertools.product(Rates._fields, (step, 1 / step)):
            other = rates._replace(**{name: getattr(rates, name) * by})
            rates = min(rates, other, key=loss)
    return rates


def held_out(rows):
    """Predict each third of the kernels by constants fitted to the others -> {limit: median error in percent}."""
    kernels = sorted({row["kernel"] for row in rows})
    errors = collections.defaultdict(list)
    for third in range(3):
        names = kernels[third::3]
        rates = fitted([row for row in rows if row["kernel"] not in names])
        for row in rows:
            if row["kernel"] in names:
                times = limits(Counts(*row["launches"][-1]), rates)
                errors[max(times, key=times.get)].append(100 * math.expm1(abs(error(row, rates))))
    return {limit: statistics.median(of) for limit, of in errors.items()}


def edges_of_sources(args, store):
    """Sample a batch -> for each block the number of edges of every source."""
    sampler = NeighborSampler(store.indptr, store.indices, args.fanout, seed=0, check=False)
    shuffled = torch.randperm(len(store.split["train"]), generator=torch.Generator().manual_seed(0))
    seeds = torch.as_tensor(store.split["train"])[shuffled[: args.batch_size]]
    blocks = sampler.sample(seeds, 0)
    return [torch.bincount(block.indices.long(), minlength=block.num_src) for block in blocks]


def nearest(launch, source_edges):
    """Return the one of `edges_of_sources` that is nearest in size to a launch's block: by sources, as lists of edges by
    source may be of all hops, else by edges."""
    if (sources := launch.values.get("N")) and not launch.values.get("tiles"):
        return min(source_edges, key=lambda sizes: abs(len(sizes) - sources))
    shape = launch.values.get("indices")
    edges = shape[0] if isinstance(shape, tuple) else 0
    return min(source_edges, key=lambda sizes: abs(sizes.sum().item() - edges))


def figures_of(launches, rates, errors):
    """Add up what all launches of a kernel do, [Counts] -> figures."""
    times = collections.Counter()
    for launch in launches:
        times.update(limits(launch, rates))
    limit = max(times, key=times.get)
    return {
        "limit": limit,
        "launches": len(launches),
        "registers": max(launch.registers for launch in launches),
        "M instructions": sum(launch.warps * launch.instructions for launch in launches) / 1e6,
        "MB": sum(launch.bytes for launch in launches) / 1e6,
        "us": sum(expected(limits(launch, rates)) for launch in launches),
        "error, %": errors.get(limit, statistics.median(errors.values())),
    }


def compared(after, before, taken, figures):
    """Table of kernels by their time: after and before {kernel: [Counts]}, taken {kernel: us measured of the code before}.
    figures: function of [Counts] -> {kernel: figures}."""
    rows = {kernel: figures(launches) for kernel, launches in after.items()}
    for kernel, launches in before.items():
        of = figures(launches)
        columns = "registers", "M instructions", "MB", "us"
        rows.setdefault(kernel, {}).update({f"{name} before": of[name] for name in columns})
        rows[kernel].setdefault("error, %", of["error, %"])
    for kernel in rows.keys() & taken.keys():
        rows[kernel]["us measured before"] = taken[kernel]
    return dict(sorted(rows.items(), key=lambda row: -row[1].get("us", 0)))


def by_kernel(launches):
    """Count what launches [(Launch, what is known of its lists)] do -> {kernel: [Counts]}."""
    found = collections.defaultdict(list)
    for launch, lists in launches:
        found[launch.kernel].append(counts(launch, lists))
    return found


def bench_predict(args):
    """Print tables of our kernels in a step of the --models: in fp32 with TF32 products, in bf16, with features in 8 bits; of
    links -> the figures of results/predicted-h200.json."""
    args.seed = 0
    args.heads = 4  # as by train.py
    file = read_json(TIMES)
    rates = fitted(file["rows"])
    figures = functools.partial(figures_of, rates=rates, errors=held_out(file["rows"]))
    print(f"{rates}, fitted to {len(file['rows'])} kernels of an H200")
    store = opened(args.dataset, args.root)
    source_edges = edges_of_sources(args, store)
    runs = {}
    for model in args.models.split(",") if args.models else plain_layers():
        args.model = model
        for precision, dtype, graph in variants(store):
            launches = step_costs(args, graph, dtype).launches
            after = by_kernel((launch, nearest(launch, source_edges)) for launch in launches)
            name = f"{args.model} {precision}"
            taken = measured(args, store, precision)
            before = {
                row["kernel"]: [Counts(*launch) for launch in row["launches"]]
                for row in file["rows"]
                if taken and row["run"] == name
            }
            runs[name] = print_table(name, compared(after, before, taken, figures))
    if store.indices.nbytes > roofline.CACHE:
        store = gpu_graph.with_columns(gpu_graph.make_graph(gpu_graph.SHAPES["small"], "cpu"))
    edges = Edges(store.indptr, store.indices)
    after = by_kernel(link_launches(edges, args.batch_size))
    with patch("extras.paths.HUB", len(edges.sources)):  # before there was such a bound
        before = by_kernel(link_launches(edges, args.batch_size))
    runs["links"] = print_table("links", compared(after, before, {}, figures))
    return {"steps": file["steps"], "runs": runs}
