"""From an open task to batches: settle what the flags leave open, place the data as --mode says.

    args, used = settle(ranks, args, task)
    sampler, ring = place_data(ranks, args, task, used)

Every automatic choice is printed.
"""

import argparse
from contextlib import contextmanager

import torch

from disk import lookahead
from disk.files import StoreError, free_host_bytes, readable_size
from features import CachedFeatures, FeatureRing, expected_visits, place, share
from model import gather_rows, self_and_mean
from run import cuda_graphs
from run.allocator import trim_memory
from run.edge_data import EdgeData, edge_data, hops
from run.finite import check_features
from run.own_model import conv_of, is_own
from run.plan import batches_ahead, choose_mode, placements, weight_bytes
from sampler import DamagedGraph, NeighborSampler
from store import MmapFeatures, ReorderedFeatures

AGREEMENT = 0.2  # adjusted homophily below which gcn and gat get residual connections by default
LEAST_STEPS = 200  # optimizer steps of the default --epochs, at least: small graphs need many


def settle(ranks, args, task):
    """Settle flags whose defaults depend on the data, the machine or other flags -> (a copy of args with mode, metric,
    weights, residual, precision, epochs, weight_decay, total_batch and steps set, EdgeData of the columns in use)."""
    store, lines, values = task.store, [], {"metric": task.metric}
    valid = task.num_scored()
    examples = max(len(store.split["train"]), 1)  # 0 without labels, when nothing is trained
    values["total_batch"] = args.batch_size * args.accumulate * ranks.world
    values["steps"] = steps = -(-examples // values["total_batch"])
    values["epochs"] = args.epochs or max(10, -(-LEAST_STEPS // steps))
    if args.weight_decay is None:
        values["weight_decay"] = task.prior / examples
    weights = args.weights or (task.weights if valid else "last")
    values["weights"] = "best" if args.early_stop else weights
    if values["weights"] == "best" and args.trains and not valid:
        flag = f"--early-stop {args.early_stop}" if args.early_stop else "--weights best"
        lacks = f"{store.path} has no validation {task.examples} to compute it from"
        raise StoreError(f"{flag} goes by validation {task.metric}, and {lacks}")
    if args.turn and args.split is None and getattr(store, "num_splits", 1) > 1:
        values["split"] = args.turn % store.num_splits  # that of a checkpoint of one seed of --runs
    if args.residual is None:
        values["residual"], line = residual_helps(store, task.visible_labels())
        lines.append(f"model   {line}")
    if args.precision is None:
        has_tf32 = ranks.gpus and torch.cuda.get_device_capability(ranks.device) >= (8, 0)
        values["precision"] = "tf32" if has_tf32 else "fp32"
    no_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX2"
    if args.precision == "bf16" and not ranks.gpus and no_avx512:
        lines.append("precision  bf16 is slower than fp32 on this processor, which has no AVX-512")
    used, cores = EdgeData(), 1
    values["mode"] = "store"
    if task.placed:
        used, edge_lines = edge_data(args, task, store)
        # the least of all ranks: they have to choose the same mode
        free_gpu = torch.cuda.mem_get_info()[0] if ranks.gpus else 0
        least = ranks.gather((free_gpu, free_host_bytes(), torch.get_num_threads()))
        free_gpu, free_host, cores = map(min, zip(*least))
        options = {"procs": ranks.local_world, "free_gpu": free_gpu, "free_host": free_host}
        options |= sizes(args, task, used, cores)
        values["mode"], line, warning = choose_mode(store, args.gpus, args.mode, **options)
        ranks.say(args.verbose and f"memory  {line}")
        lines += [f"edges   {line}" for line in edge_lines]
        lines += [f"memory  {warning}"] if warning else []
    asked = args.sample_threads, args.prefetch
    ahead = batches_ahead(values["mode"], cores, *asked)
    values["sample_threads"], values["prefetch"] = ahead
    ranks.say("\n".join(lines) if args.verbose or not args.turn else "")
    return argparse.Namespace(**{**vars(args), **values}), used


def check_memory(ranks, args, task):
    """Raise StoreError if what training a built-in network holds for certain exceeds free memory, before any of it is
    allocated: weights, gradients, moments, and the hidden rows of a batch's seeds."""
    free = torch.cuda.mem_get_info()[0] if ranks.gpus else free_host_bytes() // ranks.local_world
    itemsize, batch = 8 if args.precision == "fp64" else 4, 0
    try:
        with torch.device("meta"):
            weights = weight_bytes(task.build(args), args.trains, itemsize)
    except RuntimeError as error:  # bytes above 2^63
        raise StoreError(f"--hidden {args.hidden}: {error}") from error
    if args.trains and args.num_layers > 1:
        seeds = len(task.store.split["train"]) // (args.accumulate * ranks.world)
        rows = min(args.batch_size, seeds) * task.seeds_per_example(args)
        batch = (2 if args.precision == "bf16" else itemsize) * rows * args.hidden
    if weights + batch <= free:
        return
    parts = f"weights{', gradients and moments' * args.trains} {readable_size(weights)}"
    parts += f", a batch at least {readable_size(batch)}" if batch else ""
    smaller = f"--hidden {args.hidden} or "
    smaller += (
        f"--num-layers {args.num_layers}" if weights > free else f"--batch-size {args.batch_size}"
    )
    smaller += f" or --negatives {args.negatives}" if batch > free and task.embeds else ""
    kind = "GPU memory" if ranks.gpus else "memory"
    room = f"{readable_size(free)} of {kind} are free for each process"
    raise StoreError(f"this run cannot fit: {parts}, and {room}; lower {smaller}")


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
    why = f"classes of neighbours agree by {agreement:.2f} (0: as by chance, 1: always)"
    helps = agreement < AGREEMENT
    return helps, f"{'' if helps else 'no '}residual connections: {why}"


def sizes(args, task, used, cores=1):
    """Return the keyword arguments of `placements` in run/plan.py: what the memory of a run depends on. cores: of each
    process, if --sample-threads and --prefetch are not settled."""
    sized = {
        "fanout": draws(args, used),
        "batch_size": args.batch_size * task.seeds_per_example(args),
    }
    conv = conv_of(args.model)
    sized["types"] = (args.bases or used.num_types) if conv and conv.uses_types else 0
    sized["graphs"] = cuda_graphs.hops_held(args, task.store, used) if args.trains else 0
    sized |= {name: getattr(args, name) for name in ("hidden", "sample_threads", "prefetch")}
    return {**sized, "cores": cores}


def draws(args, used):
    """Return the most neighbours drawn for a node in each hop, over all edge types; -1: all of them."""
    by_type = [k if isinstance(k, list) else [k] for k in hops(args.fanout, used)]
    return [-1 if min(ks) < 0 else sum(ks) for ks in by_type]


def place_data(ranks, args, task, used):
    """Place graph and features as --mode says and hand them to the task -> (sampler, ring), or (None, None) for a task
    that reads its own batches. If features are a tensor, the ring returns the input of GraphSAGE's first layer, own
    row beside neighbour mean, instead of raw rows: about a third of the bytes at usual fanouts."""
    store, pinned = task.store, args.mode == "pinned-cuda"
    # a user's network gets float32 under autocast
    bf16 = torch.float32 if is_own(args.model) else torch.bfloat16
    dtype = {"bf16": bf16, "fp64": torch.float64}.get(args.precision, torch.float32)
    check_features(ranks, store, dtype)
    if not task.placed:
        task.attach(ranks, args)
        return None, None
    if store.sampling_threads and args.mode in ("cpu-cpu", "cpu-cuda"):
        ranks.say(
            args.verbose
            and f"memory  {store.sampling_threads} threads read neighbour lists from the disk"
        )
    columns = {name: getattr(used, name) for name in ("weight", "time", "type", "features")}
    columns, spare = {name: c for name, c in columns.items() if c is not None}, 0
    arrays = [store.indptr, store.sampled_indices, store.labels, store.features, *columns.values()]
    try:
        if pinned:
            needs = placements(store, **sizes(args, task, used))[args.mode]
            spare = torch.cuda.mem_get_info()[0] - needs.gpu - needs.gpu_step - args.cache
            arrays = share(arrays, leads=ranks.local_rank == 0, total=ranks.sum_here)
        placed = place(*arrays[:4], args.mode, ranks.device, arrays[4:], spare)
        indptr, indices, labels, features, *placed = placed
    except (OSError, RuntimeError) as error:
        if not pinned:
            raise
        raise StoreError(f"--mode pinned-cuda: {error}") from error
    used = used._replace(**dict(zip(columns, placed)))
    features = cached(ranks, args, task, used, features)
    sampler = make_sampler(args, indptr, indices, args.fanout, used, store.sampling_threads)
    in_place = cuda_graphs.averages_in_place(args, store, features.dtype, dtype)
    options = {"slots": args.prefetch + 1, "streams": args.sample_threads, "dtype": dtype}
    options |= {"device": ranks.device, "gather": gather_rows}
    options["aggregate"] = self_and_mean if in_place else None
    task.attach(ranks, args, used, indptr, indices)  # before the ring, whose streams wait for it
    return sampler, FeatureRing(features, labels, edge_features=used.features, **options)


def make_sampler(args, indptr, indices, fanout, used, threads=None):
    """Build the NeighborSampler of the flags; used: EdgeData, the columns it draws by."""
    options = {"threads": threads, "weights": used.weight, "edge_ids": used.features is not None}
    if args.sampler == "latest" and used.time is not None or args.sampler == "labor":
        options["method"] = args.sampler
    if args.sampler == "labor":
        options["layer_dependency"] = args.layer_dependency
        options["batch_dependency"] = args.batch_dependency
    if used.time is not None:
        options |= {"edge_times": used.time, "strict": used.strict, "window": used.window}
    if used.type is not None:
        fanout = hops(fanout, used)
        options |= {"edge_type": used.type, "by_type": isinstance(fanout[0], list)}
    sampler = NeighborSampler(indptr, indices, fanout, seed=args.seed, check=False, **options)
    sampler.type_numbers = used.numbers
    return sampler


def cached(ranks, args, task, used, features):
    """Put --cache in front of the features -> the cache, one per process, of the rows that batches use most often; or
    the features as they are. Over memory-mapped features on CPU the cache looks ahead and plans the page cache too."""
    store, budget = task.store, args.cache
    mapped = args.mode == "cpu-cpu" and isinstance(store.features, MmapFeatures)
    looks_ahead = mapped and lookahead.library() is not None
    if looks_ahead and store.features.large and not budget:
        budget = store.features.default_cache() // ranks.local_world
        size = readable_size(budget)
        ranks.say(f"memory  features stay on disk behind a cache of {size}; --cache sets it")
    if args.lookahead is not None and not (looks_ahead and budget):
        needs = "needs a --cache in front of memory-mapped features, in mode cpu-cpu"
        if isinstance(store.features, ReorderedFeatures):
            needs += ", with columns in the checkpoint's order"
        raise StoreError(f"--lookahead {args.lookahead} {needs}")
    if budget and args.mode == "cuda-cuda":
        ranks.say("memory  --cache has no effect: all features are in GPU memory")
    if not budget or args.mode == "cuda-cuda":
        return features
    with reading_all_edges():
        options = task.seeds(), draws(args, used), args.batch_size * task.seeds_per_example(args)
        visits = expected_visits(store.indptr, store.indices, *options)
        visits = visits[: features.shape[0]]  # the other nodes have no features
    trim_memory(1)  # return freed heap pages before allocating the cache
    if mapped:
        store.features.reserve(budget * ranks.local_world)
    if not looks_ahead:
        return CachedFeatures(features, visits, budget, ranks.device)
    batches = args.epochs * args.steps * args.accumulate
    cache = lookahead.LookaheadCache(
        store.features,
        budget,
        args.lookahead,
        hot=visits,
        batches=batches,
        share=(ranks.local_rank, ranks.local_world),
    )
    if cache.room:
        ranks.say(
            args.verbose
            and f"memory  the page cache keeps up to {readable_size(cache.room)} of the features"
        )
    return cache


@contextmanager
def reading_all_edges():
    """Context for reading every edge of an unchecked graph: damage raises DamagedGraph, as in sampling."""
    try:
        yield
    except IndexError as error:
        reason = str(error).removeprefix("the graph is damaged: ")
        raise DamagedGraph(f"the graph is damaged: {reason}") from error
