"""From an open task to batches: settle what the flags leave open, place the data as --mode says.

    plan, used = settle(ranks, flags, task)
    sampler, ring = place_data(ranks, plan, task, used)

Every automatic choice is printed.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cache import CachedFeatures, expected_visits
from disk.files import StoreError, free_host_bytes, readable_size
from extras import STEPS, MissingExtra, extra, present, uses
from features import MODES, FeatureRing, ask, place, share, stored
from loader import NodeLoader
from model import gather_rows, self_and_mean
from run.allocator import trim_memory
from run.finite import check_features
from run.plan import (
    averages_in_place,
    batches_ahead,
    choose_mode,
    counted,
    estimate,
    placements,
    weight_bytes,
)
from sampler import DamagedGraph, NeighborSampler
from store import BACKENDS

AGREEMENT = 0.2  # adjusted homophily below which gcn and gat get residual connections by default


class Used(NamedTuple):
    """What a run takes of a graph beside neighbours, features and labels: entries that `use` of extras returned, together."""

    drawn: dict = {}  # options of NeighborSampler by which neighbours are drawn
    seen: dict = {}  # those by which edges are seen, also where all neighbours are taken
    edges: Tensor | None = None  # [M, D] features of edges, an input of layers
    times: Tensor | None = None  # int64 [V] of nodes as seeds; examples may have others
    flags: dict = {}  # values of flags that were open
    lines: tuple = ()  # to print

    options = property(lambda self: {**self.seen, **self.drawn}, doc="All of NeighborSampler.")
    timed = property(lambda self: "edge_times" in self.options, doc="Whether seeds have times.")


def used_of(flags, task):
    """Ask the extras which columns of the data of a task a run uses, and how -> Used. StoreError for flags that need a column
    the store lacks, or a model that cannot use one."""
    used = Used()
    for part in uses(flags, task, task.store):
        joined = {n: {**getattr(used, n), **part.get(n, {})} for n in ("drawn", "seen", "flags")}
        lines = [*used.lines, *part.get("lines", ())]
        used = used._replace(**{**part, **joined, "lines": lines})
    return used


def settle(ranks, flags, task):
    """Settle flags whose defaults depend on the data, the machine or other flags -> (Plan, Used)."""
    store = task.store
    flags = replace(flags, **task.settled(flags))
    lines = []
    examples = max(len(store.split["train"]), 1)  # 0 without labels, when nothing is trained
    loader = NodeLoader(
        store,
        store.split["train"],
        [],
        batch_size=flags.batch_size,
        accumulate=flags.accumulate,
        world=ranks.world,
        seed=flags.seed,
        limits=task.limits,
        load_batch=len,
    )
    steps = max(loader.steps, 1)
    values = {
        "metric": task.metric,
        "total_batch": loader.total_batch,
        "steps": steps,
        "epochs": flags.epochs or max(10, min(200, -(-task.least_steps // steps))),
        "weights": kept_weights(flags, task),
    }
    if flags.weight_decay is None:
        values["weight_decay"] = task.prior / examples
    if flags.turn and flags.split is None and store.num_splits > 1:
        # that of a checkpoint of one seed of --runs
        values["split"] = flags.turn % store.num_splits
    if flags.residual is None:
        values["residual"], line = residual_helps(store, task.visible_labels())
        lines.append(f"model   {line}")
    if flags.precision is None:
        values["precision"] = "tf32" if has_tf32(ranks, flags) else "fp32"
    bf16_on_cpu = flags.precision == "bf16" and not ranks.gpus
    if bf16_on_cpu and torch.backends.cpu.get_cpu_capability() == "AVX2":
        lines.append("precision  bf16 is slower than fp32 on this processor, which has no AVX-512")
    used = Used()
    cores = 1
    mode = "store"
    if task.placed:
        used = used_of(flags, task)
        values |= used.flags
        options = memory_options(ranks, flags, task, used)
        mode, line, warning = choose_mode(store, flags.gpus, flags.mode, **options)
        lines += fits_split(flags, store, mode, options)
        cores = options["cores"]
        ranks.say(flags.verbose and f"memory  {line}")
        lines += [f"edges   {line}" for line in used.lines]
        if warning:
            lines.append(f"memory  {warning}")
    threads, prefetch = batches_ahead(mode, cores, flags.sample_threads, flags.prefetch)
    if flags.split_features:  # when a loop is left, ranks have to have begun the same batches
        prefetch = min(ranks.gather(prefetch))
    values |= {"mode": mode, "sample_threads": threads, "prefetch": prefetch}
    ranks.say("\n".join(lines) if flags.verbose or not flags.turn else "")
    return flags.settled(**values), used


def kept_weights(flags, task):
    """Return whose weights a run keeps, "best" or "last"; StoreError if no validation example tells the best."""
    judged = task.num_scored()
    weights = flags.weights or (task.weights if judged else "last")
    if flags.early_stop:
        weights = "best"
    if weights == "best" and flags.trains and not judged:
        flag = f"--early-stop {flags.early_stop}" if flags.early_stop else "--weights best"
        raise StoreError(
            f"{flag} goes by validation {task.metric}, and "
            f"{task.store.path} has no validation {task.examples} to compute it from"
        )
    return weights


def has_tf32(ranks, flags):
    """Return whether the GPUs of a run have TF32 products, as those of another machine are taken to have."""
    if not ranks.gpus:
        return False
    return bool(flags.free_gpu) or torch.cuda.get_device_capability(ranks.device) >= (8, 0)


def memory_options(ranks, flags, task, used):
    """Return the keyword arguments of `estimate` in run/plan.py. What is free, and the cores, are the least of all
    ranks: they have to choose the same mode."""
    free_gpu = flags.free_gpu
    if free_gpu is None:
        free_gpu = torch.cuda.mem_get_info()[0] if ranks.gpus else 0
    mine = free_gpu, free_host_bytes(), torch.get_num_threads()
    free_gpu, free_host, cores = map(min, zip(*ranks.gather(mine)))
    return {
        "procs": ranks.local_world,
        "free_gpu": free_gpu or None,
        "free_host": free_host,
        **sizes(flags, task, used, cores),
    }


def fits_split(flags, store, mode, options):
    """List the advice to hold the features in the memory of all GPUs together, where each alone has no room for them."""
    if flags.gpus < 2 or mode == MODES[0] or flags.mode != "auto" or flags.split_features:
        return []
    modes, _ = estimate(store, flags.gpus, **{**options, "split": flags.gpus})
    if not modes[MODES[0]].fits:
        return []
    where = f"in the memory of {flags.gpus} GPUs together, for mode {MODES[0]}"
    return [f"memory  --split-features would hold them {where}"]


def memory_lines(ranks, flags, task):
    """List the lines of --dry-run about memory: sizes on disk, what each mode needs, the mode to choose."""
    store = task.store
    options = memory_options(ranks, flags, task, used_of(flags, task))
    modes, best = estimate(store, flags.gpus, **options)
    disk = {name: record["bytes"] for name, record in store.meta["files"].items()}
    features = disk.pop(BACKENDS[store.meta["backend"]])
    graph = sum(disk.values())
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


def residual_helps(store, known):
    """Decide whether layers that average a node's row with its neighbours' need residual connections -> (bool, reason):
    by adjusted homophily (Platonov et al., arXiv 2209.06177) over up to 32 edges each of about 4,096 of the nodes
    `known` [n], those whose labels may be used."""
    nodes = known[:: max(1, known.numel() // 4096)]
    with reading_all_edges():
        sampler = NeighborSampler(store.indptr, store.sampled_indices, [32], check=False)
        block = sampler.sample(nodes, 0)[0]
    ends = block.src_nodes.long()[block.to_pyg()[0]]  # [2, E], sources and destinations
    usable = torch.isin(ends[0], known) & (ends[0] != ends[1])
    pairs = store.labels[ends[:, usable]]
    if store.labels.dim() != 1 or pairs.shape[1] < 100:
        return False, "no residual connections: too few edges join training or validation nodes"
    chance = (pairs.flatten().bincount() / pairs.numel()).square().sum().item()
    same = (pairs[0] == pairs[1]).double().mean().item()
    agreement = (same - chance) / max(1 - chance, 1e-9)
    helps = agreement < AGREEMENT
    why = f"classes of neighbours agree by {agreement:.2f} (0: as by chance, 1: always)"
    return helps, f"{'' if helps else 'no '}residual connections: {why}"


def sizes(flags, task, used, cores=1):
    """Return the keyword arguments of `placements` in run/plan.py: what the memory of a run depends on. cores: of each
    process, if --sample-threads and --prefetch are not settled."""
    conv = flags.layer
    heads = flags.heads if "heads" in conv.takes else 1
    steps = present(STEPS).values() if flags.trains else ()
    held = sum(step.hops_held(flags, task, used) for step in steps)
    return {
        "fanout": draws(flags, used),
        "batch_size": flags.batch_size * task.seeds_per_example(flags),
        "hidden": flags.hidden,
        "types": (flags.bases or task.store.num_edge_types) * heads if conv.uses_types else 0,
        "edge_dim": 0 if used.edges is None else used.edges.shape[1],
        "graphs": held,
        "counted": counted(flags, task, used),
        "timed": used.timed,
        "split": flags.split_features * max(flags.gpus, 1),
        "sample_threads": flags.sample_threads,
        "prefetch": flags.prefetch,
        "cores": cores,
    }


def draws(flags, used):
    """Return the most neighbours drawn for a node in each hop, over all edge types; -1: all of them."""
    fanouts = used.drawn.get("fanouts", flags.fanout)
    by_type = [k if isinstance(k, list) else [k] for k in fanouts]
    return [-1 if -1 in ks else sum(ks) for ks in by_type]


def place_data(ranks, plan, task, used):
    """Place graph and features as --mode says and hand them to the task -> (sampler, ring), or (None, None) for a task
    that reads its own batches. If features are a tensor, the ring returns the input of GraphSAGE's first layer, own
    row beside neighbour mean, instead of raw rows: about a third of the bytes at usual fanouts."""
    store = task.store
    dtype = torch.float64 if plan.precision == "fp64" else torch.float32
    if plan.precision == "bf16" and plan.conv:  # a user's network: under autocast
        dtype = torch.bfloat16
    check_features(ranks, task, dtype)
    if not task.placed:
        task.attach(ranks, plan)
        return None, None
    graph, options = placed_arrays(ranks, plan, task, used)
    edges = options.pop("edges")
    indptr, indices, labels, features = graph
    over = ask(store.features, "over")
    if store.part:  # exact inference reads all rows
        store.take_features(over(features))
    features = cached(ranks, plan, task, used, features)
    options = {"fanouts": plan.fanout, "threads": store.sampling_threads, **options}
    sampler = NeighborSampler(indptr, indices, seed=plan.seed, check=False, **options)
    in_place = averages_in_place(plan, store, features.dtype, dtype)
    task.attach(ranks, plan, used, indptr, indices)  # before the ring, whose streams wait for it
    ring = FeatureRing(
        over(features),
        labels,
        edge_features=edges,
        slots=plan.prefetch + 1,
        streams=plan.sample_threads,
        dtype=dtype,
        device=ranks.device,
        gather=gather_rows,
        aggregate=self_and_mean if in_place else None,
    )
    return sampler, ring


def all_features(store):
    """Return the features of all nodes as exact inference reads them: of a part of a store, ranks gather unequally often."""
    return ask(stored(store.features), "uneven")(store.features)


def placed_arrays(ranks, plan, task, used):
    """Place the graph's arrays and the columns in use as --mode says -> ([indptr, indices, labels, features], options
    of NeighborSampler and `edges`, see `Used`)."""
    store = task.store
    pinned = plan.mode == "pinned-cuda"
    options = {**used.options, "edges": used.edges}
    columns = {name: values for name, values in options.items() if isinstance(values, Tensor)}
    features = stored(store.features)
    if any(ranks.gather(store.part or plan.split_features)):
        features = extra(".split", "--split-features").spread(ranks, plan, store, features)
    arrays = [store.indptr, store.sampled_indices, store.labels, features]
    arrays += columns.values()
    spare = 0
    try:
        if pinned:
            needs = placements(store, **sizes(plan, task, used))[plan.mode]
            spare = torch.cuda.mem_get_info()[0] - needs.gpu - needs.gpu_step - plan.cache
            arrays = share(arrays, leads=ranks.local_rank == 0, total=ranks.sum_here)
        placed = place(*arrays[:4], plan.mode, device=ranks.device, more=arrays[4:], spare=spare)
    except (OSError, RuntimeError) as error:
        if not pinned:
            raise
        raise StoreError(f"--mode pinned-cuda: {error}") from error
    return placed[:4], options | dict(zip(columns, placed[4:]))


def row_caches(plan):
    """Return the bytes of --cache in GPU memory, and in host memory."""
    return (0, plan.cache) if plan.mode == "cpu-cpu" else (plan.cache, 0)


def on_disk(ranks, plan, store):
    """Return whether features stay on disk, behind a cache that looks ahead: the same on all ranks."""
    rows = stored(store.features)
    paged = plan.mode in MODES[2:] and ask(rows, "paged") and not plan.split_features
    return all(ranks.gather(paged and (rows.large or row_caches(plan)[1] > 0)))


def cached(ranks, plan, task, used, features):
    """Put caches in front of the features, of the rows that batches use most often -> the first of them, one per process, or
    the features as they are. --cache is GPU memory in cpu-cuda and pinned-cuda; in cpu-cpu it is host memory. Over memory-mapped
    features that stay on disk the cache in host memory looks ahead and plans the page cache too; of these --dry-run prints where
    rows are, and how fast the disk delivers them."""
    store = task.store
    rows = stored(store.features)
    lookahead = looking_ahead(ranks) if on_disk(ranks, plan, store) else None
    budget = plan.cache
    if plan.split_features:  # processes fill their caches together
        budget = min(ranks.gather(budget))
    if getattr(plan, "lookahead", None) is not None and not lookahead:
        raise StoreError(
            f"--lookahead {plan.lookahead} needs memory-mapped features, with columns in the checkpoint's order, behind a "
            "--cache in mode cpu-cpu, or larger than memory in mode cpu-cuda, and no --split-features"
        )
    if budget and plan.mode == "cuda-cuda":
        ranks.say("memory  --cache has no effect: all features are in GPU memory")
    if not (budget or lookahead) or plan.mode == "cuda-cuda" or plan.dry_run and not lookahead:
        return features
    batch_size = plan.batch_size * task.seeds_per_example(plan)
    with reading_all_edges():
        visits = expected_visits(
            store.indptr, store.indices, task.seeds(), draws(plan, used), batch_size
        )
    visits = visits[: features.shape[0]]  # the other nodes have no features
    trim_memory(1)  # return freed heap pages before allocating the cache
    if not lookahead:
        if plan.mode == "cpu-cpu":
            ask(rows, "reserve")(budget * ranks.local_world)
        return CachedFeatures(features, visits, budget, ranks.device)
    gpu, host = row_caches(plan)
    tiers = lookahead.settled_tiers(rows, visits, gpu, host * ranks.local_world, ranks.local_world)
    ranks.say(f"memory  {tiers.line}")
    if plan.dry_run:
        speed = lookahead.reads_per_second(rows)
        most = speed / max(tiers.reads, 1e-9) / ranks.local_world
        ranks.say(
            f"memory  this disk: {speed:,.0f} random rows/s, at most {most:,.1f} batches/s a process"
        )
        return features
    host, room = map(min, zip(*ranks.gather((tiers.host, tiers.room))))
    rows.reserve(host)
    together = None
    if max(ranks.gather(ranks.local_world)) > 1:
        together = lookahead.Together(ranks.group_here())
    behind = partial(
        lookahead.LookaheadCache,
        rows,
        host,
        plan.lookahead,
        hot=visits,
        batches=plan.epochs * plan.steps * plan.accumulate,
        together=together,
        room=room,
    )
    if not gpu:
        return behind()
    return CachedFeatures(features, visits, gpu, ranks.device, behind)


def looking_ahead(ranks):
    """Return the module of the cache that looks ahead; None after a line that says so if its file is not there."""
    try:
        return extra(".lookahead", "looking ahead")
    except MissingExtra as error:
        ranks.say(f"memory  rows are cached, pages are left to the kernel: {error}")
        return None


@contextmanager
def reading_all_edges():
    """Context for reading every edge of an unchecked graph: damage raises DamagedGraph, as in sampling."""
    try:
        yield
    except IndexError as error:
        start = "the graph is damaged: "
        raise DamagedGraph(start + str(error).removeprefix(start)) from error
