"""From an open task to batches: settle what the flags leave open, place the data as --mode says.

    plan, used = settle(ranks, flags, task)
    sampler, ring = place_data(ranks, plan, task, used)

Every automatic choice is printed.
"""

from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from disk.files import StoreError
from extras import CACHES, extra, present, uses
from features import FeatureRing, ask, place, stored
from loader import NodeLoader
from model import gather_rows, self_and_mean
from run.finite import check_features
from run.plan import (
    averages_in_place,
    batches_ahead,
    check_memory,
    choose_mode,
    fits_split,
    memory_options,
    placements,
    sizes,
)
from sampler import DamagedGraph, NeighborSampler

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

    def draws(self, flags):
        """Return the most neighbours drawn for a node in each hop, over all edge types; -1: all of them."""
        fanouts = self.drawn.get("fanouts", flags.fanout)
        by_type = [k if isinstance(k, list) else [k] for k in fanouts]
        return [-1 if -1 in ks else sum(ks) for ks in by_type]


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
        # no example without labels, when nothing is trained
        values["weight_decay"] = task.prior / max(len(store.split["train"]), 1)
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
    plan = flags.settled(**values)
    if plan.conv:
        check_memory(ranks, plan, task)
    return plan, used


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
    if store.labels.dim() != 1:
        return False, "no residual connections: nodes have no class, one each, to compare"
    if pairs.shape[1] < 100:
        return False, "no residual connections: too few edges join training or validation nodes"
    chance = (pairs.flatten().bincount() / pairs.numel()).square().sum().item()
    same = (pairs[0] == pairs[1]).double().mean().item()
    agreement = (same - chance) / max(1 - chance, 1e-9)
    helps = agreement < AGREEMENT
    why = f"classes of neighbours agree by {agreement:.2f} (0: as by chance, 1: always)"
    return helps, f"{'' if helps else 'no '}residual connections: {why}"


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
        store.take(features=over(features))
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


def cached(ranks, plan, task, used, features):
    """Put the caches of extras in front of the features -> features; --dry-run only describes them."""
    for cache in present(CACHES).values():
        features = cache.cached(ranks, plan, task, used, features)
    return features


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
            spare = torch.cuda.mem_get_info()[0] - needs.gpu - needs.gpu_step - (plan.cache or 0)
            pinned = extra(".pinned", f"--mode {plan.mode}")
            arrays = pinned.share(arrays, leads=ranks.local_rank == 0, total=ranks.sum_here)
        placed = place(*arrays[:4], plan.mode, device=ranks.device, more=arrays[4:], spare=spare)
    except (OSError, RuntimeError) as error:
        if not pinned:
            raise
        raise StoreError(f"--mode pinned-cuda: {error}") from error
    return placed[:4], options | dict(zip(columns, placed[4:]))


@contextmanager
def reading_all_edges():
    """Context for reading every edge of an unchecked graph: damage raises DamagedGraph, as in sampling."""
    try:
        yield
    except IndexError as error:
        start = "the graph is damaged: "
        raise DamagedGraph(start + str(error).removeprefix(start)) from error
