"""Memory that a run needs in each mode, and the mode that fits.

mode, line, warning = choose_mode(store, gpus=4, free_gpu=..., free_host=..., fanout=[15, 10, 5])

`python train.py --dry-run` prints all modes.
"""

import bisect
from typing import NamedTuple

import torch

from disk.columns import COLUMNS
from disk.files import RANK_BYTES, StoreError, free_host_bytes, readable_size
from extras import PLACES, STEPS, extra, lacking, present
from features import MODES, ask, stored
from model import SAGEConv
from run.kinds import SAMPLERS

CORES_A_BATCH = 4  # as native/sampler_cpu.py takes at most
MOST_BATCHES = 4  # sampled at once by default: rows then arrive as fast as PCIe copies them
GPU_BYTES = 1 << 30  # of each GPU, besides tensors: context, libraries, communication


def batches_ahead(mode, cores, sample_threads=None, prefetch=None):
    """Settle --sample-threads and --prefetch -> both. Where the CPU samples and a GPU trains, a step waits for the CPU
    unless it works on several batches at once; where both are done by one device, one batch at a time is as fast.

    cores: of each process. prefetch, sample_threads: as given, or None.
    """
    if sample_threads is None:
        sample_threads = 1
        if mode == "cpu-cuda":
            sample_threads = min(max(cores // CORES_A_BATCH, 1), MOST_BATCHES)
            if prefetch is not None:  # more would be idle
                sample_threads = min(sample_threads, max(prefetch, 1))
    if prefetch is None:
        prefetch = sample_threads + 1
    return sample_threads, prefetch


class Placement(NamedTuple):
    """Bytes that a mode needs: for the whole run, and at most for a batch."""

    gpu: int  # of each GPU, for the whole run
    gpu_step: int  # and for a batch
    rank_step: int  # host memory of each process for a batch, beside RANK_BYTES for the whole run
    shared: int  # host memory, one copy for all processes of the machine

    def fits(self, ranks, free_gpu, free_host, steps=1):
        """Return whether it fits into free memory; with steps=0, without a batch."""
        on_host = ranks * (RANK_BYTES + steps * self.rank_step) + self.shared
        return self.gpu + steps * self.gpu_step <= (free_gpu or 0) and on_host <= free_host


class Fit(NamedTuple):
    """Result of `estimate` for a mode."""

    placement: Placement
    possible: bool  # what stays for the whole run fits
    fits: bool  # and a batch fits as well
    largest_batch: int  # most seeds that fit, up to all training nodes
    line: str  # the arithmetic, to print


def _largest_hops(V, M, fanout, batch_size):
    """Return the most nodes of a batch up to each hop, and the most edges of each hop."""
    nodes = [min(batch_size, V)]
    edges = []
    for k in fanout:
        edges.append(M if k < 0 else min(nodes[-1] * k, M))
        nodes.append(V if k < 0 else min(nodes[-1] * (k + 1), V))
    return nodes, edges


def placements(
    store,
    *,
    fanout=(15, 10, 5),
    batch_size=1024,
    hidden=256,
    cores=1,
    sample_threads=None,
    prefetch=None,
    graphs=0,
    counted=True,
    timed=False,
    types=0,
    edge_dim=0,
    split=0,
):
    """Return {mode: Placement}. graphs: hops that steps of static shapes hold in cuda-cuda; counted: node degrees tell
    how many edges are drawn, see `Rule`; timed: edges have times; types: rows that rgcn and rgat make for each destination;
    edge_dim: width of the features of edges that layers take; split: GPUs of --split-features, 1 on CPU, 0 without it;
    cores: of each process; the others are flags of train.py.

    The sizes are upper bounds: a hop has k neighbours of every node so far, and no more than V nodes and M edges. Input
    rows, nodes and edges are held for --prefetch batches and one more, where machines split features for three more. A
    SAGE layer keeps (in + 3 out) floats a destination: the mean, the result before and after ReLU, and gradients.

    Steps of static shapes hold, for each of these batches, a table of V numbers, `graphs` hops (in pinned-cuda all) with
    the sampler's scratch memory, and rows, or pairs if the outermost hop is not held. What a step computes is held twice.
    """
    V, M, F = store.num_nodes, store.num_edges, store.feature_dim
    id_bytes = store.indices.element_size()
    nodes, edges = _largest_hops(V, M, fanout, batch_size)
    widths = [F] + [hidden] * (len(fanout) - 1) + [store.num_classes]
    # embeddings; activations; weights, gradients, Adam's two moments
    compute = 16 * hidden * sum(count for count, width in store.node_types.values() if not width)
    for n, a, b in zip(nodes[-2::-1], widths, widths[1:]):  # of each layer, outermost first
        compute += 8 * n * ((1 + types) * a + 3 * b) + 32 * a * b
    held = {}
    for mode in MODES:
        more = 3 if split and mode in MODES[2:] else 1
        held[mode] = more + batches_ahead(mode, cores, sample_threads, prefetch)[1]
    batch = nodes[-1] * F * store.features.dtype.itemsize + id_bytes * (2 * sum(nodes) + sum(edges))
    if store.edge_dim:  # features and ids of the edges
        batch += sum(edges) * (store.edge_dim * store.edge_features.dtype.itemsize + 8)
    typed = store.edge_type.itemsize + 8 if types else 0  # types and ids of the edges
    batch += sum(edges) * typed
    read = ["indptr", "indices", "labels", *(n for n, c in COLUMNS.items() if not c.asked)]
    graph = sum(part.nbytes for name in read if (part := getattr(store, name)) is not None)
    table = F * stored(store.features).dtype.itemsize * store.features.shape[0]
    step = {mode: count * batch + compute for mode, count in held.items()}

    def tables(mode):
        """Of a GPU sampler: one for eager steps, one for each batch of steps of static shapes."""
        return id_bytes * V + 4 * V * held[mode] * bool(graphs)

    def gpu_step(mode, hops):
        """For batches, with this many hops in steps of static shapes."""
        places = sum(edges[:hops]) + nodes[0]
        rows = sum(nodes[: hops + 1])
        slot = 4 * F * nodes[hops] * (2 if hops < len(fanout) else 1)
        if not counted:  # pairs of rows with all hops held
            slot = max(slot, 8 * F * nodes[hops - 1])
        # 12: winners, numbers, counts; 16: edges and keys of draws; 60: a hash table of pairs, their times
        scratch = 12 + typed + 16 * (not counted) + 60 * timed
        slot += id_bytes * (2 * rows + places) + scratch * places
        slot += (4 * edge_dim + 8) * places if edge_dim else 0  # rows and ids
        return step[mode] + (held[mode] * slot + compute) * bool(graphs)

    whole_run = GPU_BYTES + graph + -(-table // max(split, 1)) + tables("cuda-cuda")
    return {
        "cuda-cuda": Placement(whole_run, gpu_step("cuda-cuda", graphs), 0, 0),
        "pinned-cuda": Placement(
            GPU_BYTES + tables("pinned-cuda"),
            gpu_step("pinned-cuda", len(fanout)),
            0,
            graph + table,
        ),
        # pinning rounds up
        "cpu-cuda": Placement(GPU_BYTES, step["cpu-cuda"], 2 * held["cpu-cuda"] * batch, 0),
        "cpu-cpu": Placement(0, 0, step["cpu-cpu"], 0),
    }


def estimate(store, gpus=0, *, procs=1, free_gpu, free_host, **sizes):
    """Estimate the memory of training in each mode -> ({mode: Fit}, the first mode that fits, else the least demanding
    one that is possible, else None).

    Args:
        gpus: GPUs of this machine to use, one process each; 0: `procs` processes train on CPU.
        free_gpu: free bytes of the fullest GPU; None or 0: there is none. free_host: free bytes of host memory.
        sizes: see `placements`.
    """
    ranks = gpus or procs
    choices = [mode for mode in MODES[:3] if not lacking(PLACES, mode)] if gpus else MODES[3:]
    if sizes.get("split"):
        choices = [mode for mode in choices if mode != "pinned-cuda"]
    if store.part:
        choices = [mode for mode in choices if mode in MODES[2:]]
    room = ranks, free_gpu, free_host
    seeds = range(1, len(store.split["train"]) + 1)
    modes = {}
    size = readable_size
    on_gpu = f"of {size(free_gpu)} free" if free_gpu else "(no GPU here)"
    for mode, p in placements(store, **sizes).items():
        sized = lambda n: placements(store, **{**sizes, "batch_size": n})[mode]  # noqa: E731
        largest = bisect.bisect_left(seeds, True, key=lambda n: not sized(n).fits(*room))
        line = f"host {ranks} x ({size(RANK_BYTES)} + {size(p.rank_step)} for batches)"
        line += f" + {size(p.shared)} shared" * bool(p.shared)
        line += (
            f" = {size(ranks * (RANK_BYTES + p.rank_step) + p.shared)} of {size(free_host)} free"
        )
        if mode != "cpu-cpu":
            gpu = f"{size(p.gpu)} + {size(p.gpu_step)} for batches = {size(p.gpu + p.gpu_step)}"
            line = f"each GPU {gpu} {on_gpu}, {line}"
        modes[mode] = Fit(p, p.fits(*room, steps=0), p.fits(*room), largest, line)
    best = [mode for mode in choices if modes[mode].fits]
    best += [mode for mode in reversed(choices) if modes[mode].possible]
    return modes, best[0] if best else None


def weight_bytes(network, trained=True, itemsize=4):
    """Return the bytes of a network's weights and, if they are `trained`, of their gradients and Adam's two moments; a
    table with sparse gradients has none of its own. network: module, also on the meta device."""
    sparse = {module.weight for module in network.modules() if getattr(module, "sparse", False)}
    copies = lambda p: (3 if p in sparse else 4) if trained else 1  # noqa: E731
    return sum(itemsize * p.numel() * copies(p) for p in network.parameters())


def choose_mode(store, gpus=0, mode="auto", **options):
    """Choose where graph and features live, or check a choice (mode: "auto" or one of MODES), before anything is
    loaded -> (mode, the arithmetic in one line, a warning or ""). options: see `estimate`. Raises StoreError if a mode's
    arrays exceed memory; of a batch that may not fit, whose size is an upper bound, only the warning speaks."""
    modes, best = estimate(store, gpus, **options)
    chosen = mode if mode != "auto" else best or ("cpu-cuda" if gpus else "cpu-cpu")
    fit = modes[chosen]
    line = f"mode {chosen}: {fit.line}"
    if not fit.possible:
        raise StoreError(f"{line}: this cannot work here{f'; mode {best} can' if best else ''}")
    warning = (
        f"a batch may be too large for the free memory: {fit.largest_batch:,} seeds fit for certain "
        "(--batch-size, --fanout, --hidden)"
    )
    return chosen, line, "" if fit.fits else warning


def memory_options(ranks, flags, task, used):
    """Return the keyword arguments of `estimate`. What is free, and the cores, are the least of all
    ranks: they have to choose the same mode."""
    free_gpu = flags.free_gpu or (torch.cuda.mem_get_info()[0] if ranks.gpus else 0)
    mine = free_gpu, free_host_bytes(), torch.get_num_threads()
    free_gpu, free_host, cores = map(min, zip(*ranks.gather(mine)))
    return {
        "procs": ranks.local_world,
        "free_gpu": free_gpu,
        "free_host": free_host,
        **sizes(flags, task, used, cores),
    }


def fits_split(flags, store, mode, options):
    """List the advice to hold the features in the memory of all GPUs together, where each alone has no room for them."""
    if flags.gpus < 2 or mode == "cuda-cuda" or flags.mode != "auto" or flags.split_features:
        return []
    modes, _ = estimate(store, flags.gpus, **{**options, "split": flags.gpus})
    if not modes["cuda-cuda"].fits:
        return []
    where = f"in the memory of {flags.gpus} GPUs together, for mode cuda-cuda"
    return [f"memory  --split-features would hold them {where}"]


def memory_lines(ranks, flags, task, used):
    """List the lines of --dry-run about memory: sizes on disk, what each mode needs, the mode to choose."""
    store = task.store
    options = memory_options(ranks, flags, task, used)
    modes, best = estimate(store, flags.gpus, **options)
    disk = {name: record["bytes"] for name, record in store.meta["files"].items()}
    features = sum(size for name, size in disk.items() if name.startswith("features."))
    graph = sum(disk.values()) - features
    lines = {"on disk": f"graph {readable_size(graph)}, features {readable_size(features)}"}
    arrays = modes["pinned-cuda"].placement.shared
    if store.part:
        lines["on disk"] += f": {extra('.parts').described_part(store)}"
        arrays = graph + features
    for mode, fit in modes.items():
        lines[mode] = fit.line
        if fit.largest_batch:
            lines[mode] += f"; batches of up to {fit.largest_batch:,} seeds fit"
    lines["mode"] = best or "none fits (--free-gpu 80GB asks about another machine's GPUs)"
    free_host = options["free_host"]
    where = "the mapped file stays in it"
    if arrays > free_host:
        where = "rows are read from the mapped file's disk, behind --cache"
    if store.indices.nbytes > free_host // 2:
        where += (
            f", and neighbour lists as they are sampled ({readable_size(store.indices.nbytes)})"
        )
    lines["features"] = (
        f"mmap: graph and features take {readable_size(arrays)} and {readable_size(free_host)} of host "
        f"memory are free: {where}; lmdb is for rows that change while others read them"
    )
    return [f"{name:<14} {value}" for name, value in lines.items()]


def check_memory(ranks, plan, task):
    """Raise StoreError if what training a built-in network holds for certain exceeds free memory, before any of it is
    allocated: weights, gradients, moments, and the hidden rows of a batch's seeds."""
    if ranks.gpus:
        free = plan.free_gpu or torch.cuda.mem_get_info()[0]
    else:
        free = free_host_bytes() // ranks.local_world
    itemsize = 8 if plan.precision == "fp64" else 4
    batch = 0
    try:
        with torch.device("meta"):
            weights = weight_bytes(task.build(plan), plan.trains, itemsize)
    except RuntimeError as error:  # bytes above 2^63
        raise StoreError(f"--hidden {plan.hidden}: {error}") from error
    if plan.trains and plan.num_layers > 1:
        seeds = len(task.store.split["train"]) // (plan.accumulate * ranks.world)
        rows = min(plan.batch_size, seeds) * task.seeds_per_example(plan)
        batch = (2 if plan.precision == "bf16" else itemsize) * rows * plan.hidden
    if weights + batch <= free:
        return
    raise StoreError(
        f"this run cannot fit: weights, gradients and moments take {readable_size(weights)}, a batch at least "
        f"{readable_size(batch)}, and {readable_size(free)} of memory are free for each process; "
        f"lower --hidden {plan.hidden}, --num-layers {plan.num_layers} or --batch-size {plan.batch_size}"
        f"{f', or --negatives {plan.negatives}' * task.are_links}"
    )


def sizes(flags, task, used, cores=1):
    """Return the keyword arguments of `placements`: what the memory of a run depends on. cores: of each
    process, if --sample-threads and --prefetch are not settled."""
    conv = flags.layer
    heads = flags.heads if "heads" in conv.takes else 1
    steps = present(STEPS).values() if flags.trains else ()
    held = sum(step.hops_held(flags, task, used) for step in steps)
    return {
        "fanout": used.draws(flags),
        "batch_size": flags.batch_size * task.seeds_per_example(flags),
        "hidden": flags.hidden,
        "types": (flags.bases or task.store.num_edge_types) * heads if conv.uses_types else 0,
        "edge_dim": 0 if used.edges is None else used.edges.shape[1],
        "graphs": held,
        "counted": counted(flags, task, used),
        "timed": used.timed,
        "split": bool(flags.split_features) * max(flags.gpus, 1),
        "sample_threads": flags.sample_threads,
        "prefetch": flags.prefetch,
        "cores": cores,
    }


def averages_in_place(args, store, *dtypes):
    """Return whether the first layer gets neighbour means computed straight from features of these dtypes, not rows.
    That reads a row for each edge; over PCIe, in pinned-cuda, gathering a row for each node moves less. Codes are decoded in
    the same pass where they are on the device that trains."""
    kinds = {torch.float32, torch.bfloat16}
    if args.mode in ("auto", "cuda-cuda", "cpu-cpu") and ask(store.features, "coded"):
        kinds.add(torch.int8)
    if store.node_types or args.edge_features or args.input_dropout or args.mode == "pinned-cuda":
        return False
    return args.conv is SAGEConv and kinds.issuperset(dtypes)


def counted(args, task, used):
    """Return whether a node's degree tells how many of its edges a run draws, see `Rule`."""
    return SAMPLERS[args.sampler].counted and not used.timed and not task.are_links
