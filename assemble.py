"""What a run is made of: flags and a name -> data where --mode wants it, sampler, ring, model.

    path = prepare(args)                                       # builds the store where it is not there yet
    tune(ranks, args)
    store, sampler, ring = open_data(ranks, args, path)
    model = build_model(ranks, args, store, ring)

Every choice that is made is said in a line. This file needs the files that it imports; train.py runs what it makes.
"""

import os
from contextlib import contextmanager

import torch
from tqdm import tqdm

import datasets
import lookahead
import own_model
import step_graph
from allocator import keep_freed_memory, trim_memory
from checkpoint import build_network
from disk import StoreError, readable_size
from edge_data import degrees_at, edge_data
from features import CachedFeatures, FeatureRing, expected_visits, place, share
from graphs import GraphDataset, GraphReader
from link import Links, Scorer, read_pairs, split_edges
from loader import AtSeedTimes
from lookahead import LookaheadCache
from model import gather_rows, graph_degrees, layerwise, self_and_mean
from own_model import is_own
from plan import choose_mode, spare_gpu_bytes
from sampler import DamagedGraph, NeighborSampler
from store import GraphStore, MmapFeatures

LEAST_STEPS = 200  # of the optimizer, by default: small graphs need many epochs
PRIOR = 0.07  # precision of a Gaussian prior of the weights: the default weight decay is PRIOR / T for T training nodes


def prepare(args):
    """The store directory of --dataset, built on first use."""
    return datasets.prepare(args.dataset, args.root, seed=args.seed, backend=args.backend, symmetrize=args.symmetrize)


def open_data(ranks, args, path):
    """Open the store and put graph and features where --mode wants them -> (store, sampler, ring).

    Where features are a tensor, the ring brings what the first layer multiplies instead of the input rows: own row
    beside mean, a third of the bytes, straight from the table.
    """
    if path is None:  # under torchrun one rank of each machine prepares the data, the others wait for it
        with ranks.patience():
            path = prepare(args) if ranks.local_rank == 0 else None
        path = path or prepare(args)
    if args.task == "graph":
        return open_graphs(ranks, args, path)
    store, links = open_graph(ranks, args, path), args.task == "link"
    nodes = torch.arange(store.num_nodes) if links else store.split["train"]  # that may be seeds
    batch_size = args.batch_size * (2 + args.negatives if links else 1)  # nodes, at most
    settle(ranks, args, store.split["train"].numel())
    used, lines = edge_data(args, store)
    graphs = step_graph.hops_held(args, store, used) if args.trains else 0
    sizes = {"fanout": args.fanout, "batch_size": batch_size, "hidden": args.hidden, "prefetch": args.prefetch,
             "graphs": graphs}  # fmt: skip
    args.mode, line = choose_mode(store, args.gpus, args.mode, procs=ranks.local_world, **sizes)
    if ranks.leads:
        print(f"memory  {line}", *(f"edges   {line}" for line in lines), sep="\n")
        if store.sampling_threads and args.mode in ("cpu-cpu", "cpu-cuda"):
            print(f"memory  {store.sampling_threads} threads read neighbour lists from the disk as they are sampled")
    indptr, indices, labels, features, placed = place_data(ranks, args, store, used, sizes)
    features = cached(ranks, args, store, features, nodes, batch_size)
    sampler = make_sampler(args, indptr, indices, args.fanout, placed, store.sampling_threads)
    bf16 = torch.float32 if is_own(args.model) else torch.bfloat16  # a network of one's own gets float32 under autocast
    dtype = {"bf16": bf16, "fp64": torch.float64}.get(args.precision, torch.float32)
    in_place = step_graph.averages_in_place(args, features.dtype, dtype)
    ring = FeatureRing(features, labels, slots=args.prefetch + 1, device=ranks.device, streams=args.sample_threads,
                       log=tqdm.write if ranks.leads else None, dtype=dtype, gather=gather_rows,
                       aggregate=self_and_mean if in_place else None, edge_features=placed.features)  # fmt: skip
    if links:  # one object stands for both
        ring = sampler = Links(store, sampler, ring, negatives=args.negatives, by_degree=args.negatives_by == "degree",
                               seed=args.seed, checked=not args.unchecked_negatives,
                               softmax=args.link_loss == "softmax")  # fmt: skip
    return store, sampler, ring


def open_graphs(ranks, args, path):
    """Many small graphs -> (GraphDataset, and twice their reader, which is sampler and ring)."""
    args.mode, graphs = "store", GraphDataset.open(path)
    graphs.check_split()
    if not graphs.split["train"].numel():
        raise StoreError(f"{path} has no training graphs; build it with a split")
    settle(ranks, args, graphs.split["train"].numel())
    reader = GraphReader(graphs, ranks.device, args.sample_threads)
    return graphs, reader, reader


def open_graph(ranks, args, path):
    """The store with the split of nodes, or of edges, that this run takes."""
    store, links = GraphStore.open(path), args.task == "link"
    if links:
        with reading_all_edges():
            store = split_edges(store, args.edge_split, args.seed, timed=args.temporal != "off")
        store.num_classes = args.hidden  # the width of embeddings
        if args.pairs:
            read_pairs(args.pairs, store.num_nodes)  # what is wrong with it is said before anything is trained
    elif not store.labelled and args.trains:
        raise StoreError(
            f"{path} has no labels to learn from: --resume FILE --predict FILE.npy predicts them, and --task "
            "link learns from edges"
        )
    else:
        say = print if ranks.leads else lambda line: None
        datasets.choose_split(store, args.split, seed=args.seed, turn=args.turn, say=say)
        store.check_split()
    args.metric = args.metric or ("mrr" if links else "accuracy" if store.labels.dim() == 1 else "f1")
    if args.early_stop and not store.split["valid"].numel():
        examples = "edges" if links else "nodes"
        raise StoreError(
            f"--early-stop {args.early_stop} goes by validation {args.metric}, and {path} has no validation {examples}"
        )
    return store


def place_data(ranks, args, store, used, sizes):
    """Put graph, labels, features and the columns in `used` where --mode wants them -> (indptr, indices, labels,
    features, EdgeData)."""
    columns = {name: column for name in ("weight", "time", "features") if (column := getattr(used, name)) is not None}
    arrays, spare = [store.indptr, store.sampled_indices, store.labels, store.features, *columns.values()], 0
    if args.mode == "pinned-cuda":
        if ranks.local_world < ranks.world:
            raise StoreError("--mode pinned-cuda works on one machine; use cpu-cuda or cuda-cuda across machines")
        spare = spare_gpu_bytes(store, args.mode, *sizes.values()) - args.cache
        arrays = share(arrays, leads=ranks.local_rank == 0, total=ranks.sum if ranks.world > 1 else None)
    indptr, indices, labels, features, *placed = place(*arrays[:4], args.mode, ranks.device, arrays[4:], spare)
    return indptr, indices, labels, features, used._replace(**dict(zip(columns, placed)))


def make_sampler(args, indptr, indices, fanout, used, threads=None):
    """The sampler of the flags, which draws by the columns in `used`, an EdgeData."""
    options = {"seed": args.seed, "check": False, "weights": used.weight, "edge_ids": used.features is not None}
    options["threads"] = threads
    if args.sampler == "latest" and used.time is not None:
        options["method"] = "latest"
    if args.sampler == "labor":
        options |= {
            "method": "labor",
            "layer_dependency": args.layer_dependency,
            "batch_dependency": args.batch_dependency,
        }
    if used.time is None:
        return NeighborSampler(indptr, indices, fanout, **options)
    timed = NeighborSampler(indptr, indices, fanout, edge_times=used.time, strict=used.strict, **options)
    return timed if used.seed_time is None else AtSeedTimes(timed, used.seed_time)


def cached(ranks, args, store, features, nodes, batch_size):
    """The features behind the cache of --cache, one for each process; without the flag as they are.

    On CPU, before a memory-mapped table, the cache holds the rows that the next batches use soonest; on a GPU, and
    before LMDB, whose rows may change, those that batches with seeds among `nodes` use most often, chosen once.
    """
    mapped = args.mode == "cpu-cpu" and isinstance(store.features, MmapFeatures)
    looks_ahead = mapped and lookahead.library() is not None
    if looks_ahead and store.features.large and not args.cache:
        args.cache = store.features.default_cache() // ranks.local_world
        if ranks.leads:
            print(f"memory  features stay on disk behind a cache of {readable_size(args.cache)}; --cache sets it")
    if args.lookahead is not None and not (looks_ahead and args.cache):
        raise StoreError(f"--lookahead {args.lookahead} is for a --cache before features that are mapped from a file, "
                         f"in mode cpu-cpu; here --cache is {args.cache}, their backend {store.meta['backend']}, the "
                         f"mode {args.mode}")  # fmt: skip
    if args.cache and args.mode == "cuda-cuda" and ranks.leads:
        print(f"memory  --cache {readable_size(args.cache)} has no effect: all features are in GPU memory")
    if not args.cache or args.mode == "cuda-cuda":
        return features
    with reading_all_edges():
        visits = expected_visits(store.indptr, store.indices, nodes, args.fanout, batch_size)
    trim_memory(1)  # what that took, and the cache can have
    if mapped:
        store.features.beside += args.cache * ranks.local_world
    if looks_ahead:
        batches = args.epochs * args.steps * args.accumulate
        share = ranks.local_rank, ranks.local_world
        cache = LookaheadCache(store.features, args.cache, args.lookahead, visits, batches, share)
        if cache.room and ranks.leads:
            print(f"memory  the page cache keeps up to {readable_size(cache.room)} of the features")
        return cache
    return CachedFeatures(features, visits, args.cache, ranks.device)


def settle(ranks, args, examples):
    """Fill in what depends on the number of training examples, and on nothing that more processes would change."""
    args.total_batch = args.batch_size * args.accumulate * ranks.world
    examples = max(examples, 1)  # without labels there are none, and nothing is trained
    args.steps = -(-examples // args.total_batch)
    if args.epochs is None:
        args.epochs = max(10, -(-LEAST_STEPS // args.steps))
    if args.weight_decay is None:
        args.weight_decay = PRIOR / examples if args.task == "node" else 0.0


def tune(ranks, args):
    """Allocator and precision settings, each said in one line."""
    if args.precision is None:
        has_tf32 = ranks.gpus and torch.cuda.get_device_capability(ranks.device) >= (8, 0)
        args.precision = "tf32" if has_tf32 else "fp32"
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" and ranks.gpus else "highest")
    said = "left alone"
    if args.allocator == "tuned" and ranks.gpus:
        set_to = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
        said = f"CUDA {set_to or 'default, for segments that grow need libnvidia-ml'}"
    elif args.allocator == "tuned":
        said = "freed memory is kept (mallopt)" if keep_freed_memory() else "no glibc to tune"
        said += f", oneDNN keeps {os.environ.get('ONEDNN_PRIMITIVE_CACHE_CAPACITY', 'all')} products"
    if ranks.leads:
        print(f"memory  allocator: {said}; --allocator system leaves it alone")


def build_model(ranks, args, store, ring):
    """The model with the initial weights of --seed, the same on every rank."""
    torch.manual_seed(args.seed)
    if is_own(args.model):
        sees = edge_data(args, store)[0].features is not None
        sizes = store.feature_dim, store.num_classes, store.edge_dim if sees else 0
        model, args.model_digest = own_model.build(args.model, args.model_args or [], *sizes)
        args.model_width = store.num_classes  # of its output
        if args.task == "link":
            model.scorer = Scorer(args.scorer, store.num_classes)
    else:
        widths = {name: getattr(store, name, 0) for name in ("num_classes", "edge_dim")}
        model = build_network(args, {**store.meta, **widths})
    if args.task == "graph" and not ring.binary:
        model.mean.copy_(ring.mean), model.std.copy_(ring.std)
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    model.to(ranks.device, dtype)
    if layerwise(model) and any(layer.uses_degree for layer in model.layers):
        used, _ = edge_data(args, store)
        with reading_all_edges():
            if used.time is not None:
                model.degrees = degrees_at(store.indptr, used.time, used.strict)
            else:
                model.degrees = graph_degrees(store.indptr, store.indices).to(ranks.device, dtype)
    return model


@contextmanager
def reading_all_edges():
    """A context for what reads every edge of a graph that nobody has checked: damage is a DamagedGraph, as in
    sampling."""
    try:
        yield
    except IndexError as error:
        raise DamagedGraph(str(error)) from error
