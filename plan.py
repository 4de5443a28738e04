"""What a run will take and what to choose: memory in each mode, the mode that fits, whether several processes pay.

    mode, line = choose_mode("my_store", gpus=4, fanout=[15, 10, 5])

    python store.py estimate PATH --gpus 4 --fanout 15,10,5

Letters: V nodes and M edges of the graph, F feature width. This file needs edge_data.py, features.py, flags.py,
step_graph.py and store.py.
"""

from __future__ import annotations

import bisect
import time
from typing import NamedTuple

import torch

from columns import COLUMNS
from disk import StoreError, readable_size
from edge_data import edge_data
from features import MODES
from flags import make_parser
from model import layerwise
from step_graph import hops_held
from store import BACKENDS, GraphStore, free_host_bytes

GPU_BYTES = 1 << 30  # of a GPU that training takes beside its tensors: context, libraries, communication
RANK_BYTES = 1 << 29  # of host memory, for each process


class Placement(NamedTuple):
    """Bytes that a mode takes: what stays for the whole run, and what a batch adds at most."""

    gpu: int  # of each GPU, stays
    gpu_step: int
    rank: int  # host memory of each process, stays
    rank_step: int
    shared: int  # host memory, one copy for all processes of the machine


def _placements(store, fanout, batch_size, hidden, prefetch, graphs=0) -> dict[str, Placement]:
    """The Placement of every mode.

    A batch of S seeds and fanout k1,k2,... has at most n1 = S (k1 + 1), n2 = n1 (k2 + 1), ... nodes after each hop
    and n1 k2, ... edges; no hop has more than V nodes or M edges, and k = -1 counts as all of them. Input rows, nodes
    and edges are held for `prefetch` + 1 batches. A GraphSAGE layer keeps (in + 3 out) floats for each of its
    destinations and as many for the gradients: the mean, and the result before and after ReLU and dropout.

    With `graphs` steps are of static shapes, in memory of their own (step_graph.py): for each of the `prefetch` + 1 a
    table of V numbers, so many hops with their sampler's notes, and the input, rows or, where the outermost hop is not
    among them, pairs; and once what a step computes, beside what other batches and the validation compute.
    """
    V, M, F = store.num_nodes, store.num_edges, store.feature_dim
    id_bytes, row_bytes = store.indices.element_size(), F * store.features.dtype.itemsize
    nodes, edges = [min(batch_size, V)], []
    for k in fanout:
        edges.append(M if k < 0 else min(nodes[-1] * k, M))
        nodes.append(V if k < 0 else min(nodes[-1] * (k + 1), V))
    widths = [F] + [hidden] * (len(fanout) - 1) + [store.num_classes]
    layers = list(zip(nodes[-2::-1], widths, widths[1:]))  # outermost first
    compute = sum(8 * n * (a + 3 * b) + 32 * a * b for n, a, b in layers)  # and weights, gradients, Adam's two moments
    ahead = prefetch + 1
    batch = nodes[-1] * row_bytes + id_bytes * (2 * sum(nodes) + sum(edges))
    if store.edge_dim:  # rows of the edges, and which edges they are
        batch += sum(edges) * (store.edge_dim * store.edge_features.dtype.itemsize + 8)
    arrays = 8 * (2 * V + 1) + id_bytes * M + row_bytes * V + sum(
        column.nbytes for name in COLUMNS if (column := getattr(store, name)) is not None)
    step, tables, static = ahead * batch + compute, id_bytes * V, 0
    rank = RANK_BYTES + (0 if store.edge_time is None else 16 * V)  # what the C sampler keeps of the lists
    if graphs:
        places, rows = sum(edges[:graphs]) + nodes[0], sum(nodes[: graphs + 1])
        slot = 4 * F * nodes[graphs] * (2 if graphs < len(fanout) else 1)
        slot += id_bytes * (2 * rows + places) + 12 * places  # 12: winners, numbers, counts
        tables, static = tables + 4 * V * ahead, ahead * slot + compute
    return {"cuda-cuda": Placement(GPU_BYTES + arrays + tables, step + static, RANK_BYTES, 0, 0),
            "pinned-cuda": Placement(GPU_BYTES + tables, step + static, RANK_BYTES, 0, arrays),
            "cpu-cuda": Placement(GPU_BYTES, step, rank, 2 * ahead * batch, 0),  # pinning rounds up
            "cpu-cpu": Placement(0, 0, rank, step, 0)}


def estimate(store, gpus=0, *, procs=1, fanout=(15, 10, 5), batch_size=1024, hidden=256, prefetch=2, graphs=0,
             free_gpu=None, free_host=None) -> dict:
    """Say what training on a store takes in each mode and what fits.

    Args:
        store: GraphStore or the path of one.
        gpus: GPUs of this machine, a process each; with 0, `procs` processes train on CPU.
        fanout: one number for each layer, from the seeds outward.
        batch_size: seeds of a process. hidden: width of the inner layers. prefetch: batches prepared ahead.
        graphs: hops that steps of static shapes hold (`hops_held` of step_graph.py) where the GPU reads the features.
        free_gpu: free bytes of the fullest GPU; asked of the current one when None.
        free_host: free bytes of host memory; asked of the system when None.

    Returns:
        dict: "modes" {mode: dict of `Placement` and "possible" (what stays fits), "fits" (a batch as well),
        "largest_batch" (that fits; up to all training nodes)}, "sums" {mode: what it takes of what is free, a line},
        "mode" (the first that fits, else the most modest that is possible, else None), "backend" and "backend_why".

    Raises:
        StoreError: if there is no store.
    """
    store = store if isinstance(store, GraphStore) else GraphStore.open(store)
    if free_gpu is None and torch.cuda.is_available():
        free_gpu = torch.cuda.mem_get_info()[0]
    free_host = free_host_bytes() if free_host is None else free_host
    ranks, choices = gpus or procs, MODES[:3] if gpus else MODES[3:]

    def fits(mode, batch_size):
        p = _placements(store, fanout, batch_size, hidden, prefetch, graphs)[mode]
        step = batch_size > 0
        return (p.gpu + step * p.gpu_step <= (free_gpu or 0)
                and ranks * (p.rank + step * p.rank_step) + p.shared <= free_host)

    modes = {}
    for mode, placement in _placements(store, fanout, batch_size, hidden, prefetch, graphs).items():
        sizes = range(1, len(store.split["train"]) + 1)
        largest = bisect.bisect_left(sizes, True, key=lambda n: not fits(mode, n))
        modes[mode] = dict(placement._asdict(), possible=fits(mode, 0), fits=fits(mode, batch_size),
                           largest_batch=largest)
    mode = next((m for m in choices if modes[m]["fits"]), None)
    mode = mode or next((m for m in reversed(choices) if modes[m]["possible"]), None)
    arrays = modes["pinned-cuda"]["shared"]
    edges, where = store.indices.nbytes, "the mapped file stays in it"
    if arrays > free_host:
        where = "rows are read from the mapped file's disk, behind --cache"
    if edges > free_host // 2:
        where += f", and neighbour lists as they are sampled (all take {readable_size(edges)})"
    why = (
        f"graph and features take {readable_size(arrays)} and {readable_size(free_host)} of host memory are free: "
        f"{where}; lmdb is for rows that change while others read them"
    )
    sums = {m: _sum_line(m, placement, ranks, free_gpu, free_host) for m, placement in modes.items()}
    return {"modes": modes, "sums": sums, "mode": mode, "backend": "mmap", "backend_why": why}


def choose_mode(store, gpus=0, mode="auto", **options) -> tuple[str, str]:
    """Choose where graph and features live, or check a choice, before anything is loaded.

    Args:
        store, gpus, options: see `estimate`.
        mode: "auto" or one of MODES.

    Returns:
        (mode, the sum that was done, in one line).

    Raises:
        StoreError: for a mode that cannot work: what stays in memory for the whole run is more than there is. (A batch
            that may not fit is only said in the line: its size is an upper bound.)
    """
    options = options if gpus else {"free_gpu": 0, **options}  # to ask a GPU takes memory there
    found = estimate(store, gpus, **options)
    chosen = mode if mode != "auto" else found["mode"] or ("cpu-cuda" if gpus else "cpu-cpu")
    line, placement = f"mode {chosen}: {found['sums'][chosen]}", found["modes"][chosen]
    if not placement["possible"]:
        other = f"; mode {found['mode']} can" if found["mode"] else ""
        raise StoreError(f"{line}: this cannot work here{other}")
    if not placement["fits"]:
        line += f"; a batch may be too large; {placement['largest_batch']:,} seeds fit for certain"
    return chosen, line


def spare_gpu_bytes(store, mode, *sizes) -> int:
    """Bytes of the current GPU that are free beside what a mode and its batches take at most; sizes as `_placements`
    has them. May be below 0."""
    placement = _placements(store, *sizes)[mode]
    return torch.cuda.mem_get_info()[0] - placement.gpu - placement.gpu_step


def _sum_line(mode, p, ranks, free_gpu, free_host) -> str:
    """What a mode takes of what is free, with its terms; p is its entry of `estimate`."""
    shared = f" + {readable_size(p['shared'])} shared" if p["shared"] else ""
    host = (f"host {ranks} x ({readable_size(p['rank'])} + {readable_size(p['rank_step'])} for batches){shared} = "
            f"{readable_size(ranks * (p['rank'] + p['rank_step']) + p['shared'])} of {readable_size(free_host)} free")
    if mode == "cpu-cpu":
        return host
    free = "(no GPU here)" if free_gpu is None else f"of {readable_size(free_gpu)} free"
    return (f"each GPU {readable_size(p['gpu'])} + {readable_size(p['gpu_step'])} for batches = "
            f"{readable_size(p['gpu'] + p['gpu_step'])} {free}, {host}")


def estimate_lines(path, fanout=(15, 10, 5), **options) -> str:
    """What `python store.py estimate` prints: sizes on disk, each mode, the mode and the backend to choose."""
    graph, args = GraphStore.open(path), make_parser().parse_args([f"--fanout={','.join(map(str, fanout))}"])
    graphs = hops_held(args, graph, edge_data(args, graph)[0])
    found = estimate(graph, fanout=fanout, graphs=graphs, **options)
    disk = {name: record["bytes"] for name, record in graph.meta["files"].items()}
    features = disk.pop(BACKENDS[graph.meta["backend"]])
    lines = [("on disk", f"graph {readable_size(sum(disk.values()))}, features {readable_size(features)}")]
    for mode, placement in found["modes"].items():
        lines.append((mode, f"{found['sums'][mode]}; batches of up to {placement['largest_batch']:,} seeds fit"))
    lines.append(("mode", found["mode"] or "none fits (--free-gpu GB asks about another machine's GPUs)"))
    shapes = "static shapes, for CUDA graphs, in cuda-cuda and pinned-cuda" if graphs else "the shapes of their batches"
    lines.append(("steps", f"of {shapes}"))
    lines.append(("features", f"{found['backend']}: {found['backend_why']}"))
    return "\n".join(f"{name:<14} {value}" for name, value in lines)


# ---------------------------------------------------------------------------------------------------------------------
# several processes


def work_of_a_step(args, store, model):
    """Expected (floating-point operations, bytes of gathered rows) of an optimizer step over all its seeds."""
    rows = min(args.total_batch, store.split["train"].numel())
    degree = store.num_edges / max(1, store.num_nodes)
    operations = moved = 0
    hops = len(args.fanout)
    layers = model.layers if layerwise(model) else [model] * hops  # of a network of one's own, each hop takes a share
    for hop, (k, layer) in enumerate(zip(args.fanout, reversed(layers), strict=True)):
        edges = rows * (min(k, degree) if k >= 0 else degree)
        weights = sum(parameter.numel() for parameter in layer.parameters()) / (hops if layer is model else 1)
        operations += 6 * rows * weights  # a product and its two gradients
        moved += 12 * edges * (store.feature_dim if hop == hops - 1 else args.hidden)
        rows = min(rows + edges, store.num_nodes)
    return operations, moved


def seconds_of(function, device, repeat=5):
    """The median time of a call."""
    times = []
    for _ in range(repeat + 1):  # one to warm up
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeat // 2]


def advice(ranks, args, store, model):
    """A line with the estimate behind it where one process would be faster than so many, else None; for all ranks.

    Rates are measured here: a matrix product, a copy, and the exchange of this model's gradients. The processes of
    one machine without GPUs share its cores, so they do not compute faster than one process does.
    """
    square = torch.rand(*[8192 if ranks.gpus else 768] * 2, device=ranks.device)
    gradients = torch.zeros(sum(parameter.numel() for parameter in model.parameters()), device=ranks.device)
    flops = 2 * len(square) ** 3 / seconds_of(lambda: square @ square, ranks.device)
    bandwidth = 8 * square.numel() / seconds_of(square.clone, ranks.device)
    exchange = seconds_of(lambda: ranks.reduce(gradients), ranks.device)
    operations, moved = work_of_a_step(args, store, model)
    shared = 1 if ranks.gpus else ranks.local_world
    alone = (operations / flops + moved / bandwidth) / shared
    together = alone * shared / ranks.world + exchange
    if together <= alone:
        return None
    seeds = min(args.total_batch, store.split["train"].numel())
    return (f"advice  a step of {seeds:,} seeds is about {1e3 * alone:.1f} ms of work for one process; {ranks.world} "
            f"take {1e3 * (together - exchange):.1f} ms and {1e3 * exchange:.1f} ms to exchange "
            f"{gradients.nbytes / 1e6:.1f} MB of gradients{'' if ranks.gpus else ', on the same cores'}: one will be "
            "faster")  # fmt: skip
