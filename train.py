"""Train a graph neural network by neighbour sampling.

    python train.py                                                  # built-in synthetic graph, no download
    python train.py --dataset ogbn-products --fanout 15,10,5         # one GPU when there is one, else the CPU
    python train.py --gpus 4 --dataset ogbn-products                 # four GPUs of this machine
    python train.py --gpus 0 --procs 2 --dataset my_graph.npz        # two CPU processes
    python train.py --task graph --dataset molecules.npz             # a number for each of many small graphs
    python train.py --dataset cora --model gat --heads 8 --runs 10   # mean and standard deviation over ten seeds
    python train.py --resume run.pt --predict classes.npy            # classes of all nodes from a checkpoint
    python train.py --resume run.pt --predict theirs.npy --dataset other.npz    # of a graph with the same features
    torchrun --nproc-per-node 4 train.py --gpus 4 --dataset ogbn-products
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py --gpus 4 --dataset ogbn-products

One step is sample -> fetch -> forward -> backward: `train_epoch` is the loop, and loader.py runs the first two ahead of it
on threads. DESIGN.md follows one seed node through the files.
"""

import sys

import allocator

if __name__ == "__main__" and not {"system", "--allocator=system"} & set(sys.argv):
    allocator.before_torch()

import argparse
import copy
import functools
import math
import os
import statistics
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

import datasets
import ddp
import own_model
from allocator import keep_freed_memory, trim_memory
import flags
import lookahead
from checkpoint import check_graph, common_state, complete, restore, save_checkpoint
from disk import StoreError, readable_size, write_whole
from features import CachedFeatures, FeatureRing, expected_visits, place, prefetch, share
from graphs import GraphDataset, GraphReader, Regressor, scores_line
from loader import NodeLoader
from lookahead import LookaheadCache
from model import GNN, gather_rows, graph_degrees, inference, layerwise, self_and_mean
from own_model import is_own
from plan import advice, choose_mode
from report import Clock, Report, describe, draw_timeline, epoch_line, peak_memory, percent, profile
from sampler import DamagedGraph, NeighborSampler, mix
from store import GraphStore, MmapFeatures, free_host_bytes

LEAST_STEPS = 200  # of the optimizer, by default: small graphs need many epochs
PRIOR = 0.07  # precision of a Gaussian prior of the weights, by default: beside T training nodes a weight decay of PRIOR / T
WHOLE_GRAPH_EDGES = 1 << 22  # with no more, a network of one's own is evaluated on the whole graph as one batch


def train_epoch(ranks, args, store, sampler, ring, model, optimizer, stop, save, epoch, first):
    """Run the steps of one epoch from step `first` -> (steps done in the epoch, stopped early, figures, laps)."""
    model.train()
    clock, loss_sum, count, done = Clock(ranks.gpus), torch.zeros((), dtype=torch.float64, device=ranks.device), 0, first
    bar = tqdm(total=args.steps, initial=first, desc=f"epoch {epoch + 1}", leave=False, unit="step",
               disable=None if ranks.leads else True)  # None: no bar where stderr is not a terminal
    # ahead of this loop, on threads: blocks = sampler.sample(seeds, key), then x and y = ring.fetch(slot, blocks)
    loader = batches(args, ranks, store, sampler, ring, store.split["train"], timed=clock.timed)
    loader.epoch, loader.step = epoch, first
    waiting = time.perf_counter()
    for batch in loader:
        clock.add("stall", waiting, time.perf_counter())
        if batch.began is not None:
            clock.lap("transfer", batch.began, batch.ready)
        t0 = clock.mark("forward")
        output = predict(ranks, args, ring, model, batch, mix(mix(args.seed) ^ batch.key))
        if args.task == "graph":
            loss = ring.loss(output, batch.y)
        else:
            loss = F.cross_entropy(output, batch.y, reduction="sum")
        t1 = clock.mark("backward")
        with nullcontext() if batch.last or ranks.world == 1 else model.no_sync():
            # ranks average their gradients: so each seed weighs 1 / total, whatever rank and pass it is in
            (loss * (ranks.world / batch.total)).backward()
        t2 = clock.mark("optimizer" if batch.last else None)
        clock.lap("forward", t0, t1)
        clock.lap("backward", t1, t2)
        loss_sum += loss.detach()
        count += batch.y.numel()
        if batch.last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            clock.lap("optimizer", t2, clock.mark())
            done = batch.step + 1
            bar.update()
            if args.checkpoint_every and (batch.key + 1) % args.checkpoint_every == 0:
                save(epoch, done)
            if stop.agreed():
                break
        waiting = time.perf_counter()
    bar.close()
    stages = clock.totals()
    seconds = time.perf_counter() - clock.zero
    loss_sum, count = ranks.sum(loss_sum.item(), count)
    if ranks.world > 1:
        stages["exchange"] = ranks.exchange(model) * (done - first)
    figures = {"first_step": first, "loss": loss_sum / max(count, 1), "seconds": seconds, "seeds_per_s": count / seconds, **stages}
    return done, stop.answer, figures, clock.laps


def batches(args, ranks, graph, sampler, ring, seeds, **options):
    """The NodeLoader of the flags: this rank's part of every step, sampled and fetched by `sampler` and `ring`."""
    return NodeLoader(graph, seeds, args.fanout, batch_size=args.batch_size, accumulate=args.accumulate, seed=args.seed,
                      rank=ranks.rank, world=ranks.world, depth=args.prefetch, threads=args.sample_threads, sampler=sampler,
                      ring=ring, prefetch=prefetch, **options)  # fmt: skip


def predict(ranks, args, ring, model, batch, key=None):
    """Logits [S, C] of a batch's seeds, or targets of its graphs, computed in --precision; float32, float64 with fp64.

    In training, dropout is a function of the key: the same on all ranks, where it is drawn by node.
    """
    network = getattr(model, "module", model)  # of DistributedDataParallel
    if key is not None and not isinstance(network, GNN):
        torch.manual_seed(key)
    with torch.autocast(ranks.device.type, torch.bfloat16) if args.precision == "bf16" else nullcontext():
        if isinstance(network, GNN):
            output = model(batch.blocks, batch.x, aggregated=ring.first_hop, key=key)
        elif isinstance(ring, GraphReader):
            output = model(batch.blocks[0])
        else:
            try:
                output = model(batch.blocks, batch.x)
            except Exception as error:
                given = f"{len(batch.blocks)} blocks, one for each number of --fanout, and x {list(batch.x.shape)}"
                raise RuntimeError(f"{args.model} failed when it was called with {given}: {error}") from error
    if output.shape[:1] != batch.y.shape[:1]:
        raise StoreError(f"the model returned {list(output.shape)} for {len(batch.y)} seeds: a row of logits for each is needed")
    return output.to(torch.promote_types(output.dtype, torch.float32))


@torch.no_grad()
def sampled_accuracy(ranks, args, sampler, ring, model, nodes):
    """Accuracy on nodes through sampled neighbourhoods: an estimate that costs a batch or two; None without nodes."""
    if not nodes.numel():
        return None
    model.eval()
    right = 0
    for batch in batches(args, ranks, None, sampler, ring, nodes, shuffle=False):
        right += (predict(ranks, args, ring, model, batch).argmax(1) == batch.y).sum()
    return ranks.sum(int(right))[0] / nodes.numel()


def exact_logits(ranks, args, store, model, layers=None):
    """Logits float32 [V, C] of all nodes from all their neighbours: layer by layer, split over the ranks of each machine;
    for a network without layers of model.py in batches, split over all ranks. With `layers` the output of so many of
    the first layers, [V, hidden]."""
    model = copy.deepcopy(model).float() if args.precision == "fp64" else model
    if not layerwise(model):
        return logits_in_batches(ranks, args, store, model)
    features = getattr(store.features, "tensor", store.features)
    total = functools.partial(machine_sum, ranks) if ranks.local_world > 1 else None
    try:
        with reading_all_edges():
            return inference(model, store.indptr, store.indices, features, rank=ranks.local_rank,
                             world=ranks.local_world, total=total, layers=layers)  # fmt: skip
    except OSError as error:
        raise StoreError(f"no exact inference: {error}") from error


@torch.no_grad()
def logits_in_batches(ranks, args, store, model):
    """Logits float32 [V, C] of all nodes from batches that hold all neighbours as many hops away as --fanout has numbers:
    all nodes at once where the graph is small, else --batch-size, each batch computing most of the graph again."""
    model.eval()
    small = store.num_edges <= WHOLE_GRAPH_EDGES
    loader = NodeLoader(store, torch.arange(store.num_nodes), [-1] * len(args.fanout), shuffle=False, device=ranks.device,
                        batch_size=-(-store.num_nodes // ranks.world) if small else args.batch_size, rank=ranks.rank,
                        world=ranks.world, depth=0 if small else args.prefetch, reuse=True, prefetch=prefetch)  # fmt: skip
    logits = torch.zeros(store.num_nodes, store.num_classes)
    for batch in loader:
        logits[batch.seeds] = model(batch.blocks, batch.x).float().cpu()
    return ranks.reduce(logits)


def machine_sum(ranks, *values):
    """Sum numbers over the ranks of this machine -> list; all machines have to call it together."""
    machine, n = ranks.rank // ranks.local_world, len(values)
    everyones = [0.0] * (ranks.world // ranks.local_world * n)
    everyones[machine * n : (machine + 1) * n] = values
    return ranks.sum(*everyones)[machine * n : (machine + 1) * n]


def accuracies(store, predicted):
    """Share of right classes int64 [V] -> {split: accuracy or None where it is empty}."""
    right = predicted == store.labels
    return {name: right[nodes].double().mean().item() if nodes.numel() else None for name, nodes in store.split.items()}


@contextmanager
def reading_all_edges():
    """Around what reads every edge of a graph that nobody has checked: damage is DamagedGraph, as for the sampler."""
    try:
        yield
    except IndexError as error:
        raise DamagedGraph(str(error)) from error


def worker(ranks, args, path):
    """One rank's whole work -> exit code; what is wrong with the input is said in one sentence."""
    try:
        return run(ranks, args, path)[0] if args.runs == 1 else run_many(ranks, args, path)
    except (StoreError, DamagedGraph) as error:
        if not ranks.leads:
            time.sleep(1)  # rank 0 speaks for all and ends them; a rank that fails alone is still here and speaks
        hint = "; python store.py verify names the file" if isinstance(error, DamagedGraph) else ""
        print(f"train.py: {error}{hint}", file=sys.stderr)
        return 2


def run_many(ranks, args, path):
    """--runs with seeds one after the other, each drawing its own split where the data set has none -> exit code."""
    exact = []
    for seed in range(args.seed, args.seed + args.runs):
        folder = args.tensorboard and str(Path(args.tensorboard, f"seed{seed}"))
        changed = {"seed": seed, "tensorboard": folder, "run": f"{args.run}-seed{seed}"}
        code, accuracy = run(ranks, argparse.Namespace(**{**vars(args), **changed}), path)
        if code:
            return code
        exact.append(accuracy)
        path = None  # of the next seed
    columns = {name: [accuracy[name] for accuracy in exact] for name in exact[0] if exact[0][name] is not None}
    mean = {name: statistics.mean(values) for name, values in columns.items()}
    std = {name: statistics.stdev(values) for name, values in columns.items()}
    line = "  ".join(f"{name} {100 * mean[name]:.2f} +- {100 * std[name]:.2f}%" for name in mean)
    report = Report(ranks, argparse.Namespace(**{**vars(args), "tensorboard": None}))
    report.tell(f"exact accuracy over {args.runs} seeds  {line}", {"runs": args.runs, "mean": mean, "std": std})
    return 0


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
        args.mode, graphs = "store", GraphDataset.open(path)
        graphs.check_split()
        if not graphs.split["train"].numel():
            raise StoreError(f"{path} has no training graphs; build it with a split")
        settle(ranks, args, graphs.split["train"].numel())
        reader = GraphReader(graphs, ranks.device, args.sample_threads)
        return graphs, reader, reader
    store = GraphStore.open(path)
    store.check_split()
    settle(ranks, args, store.split["train"].numel())
    args.mode, line = choose_mode(store, args.gpus, args.mode, procs=ranks.local_world, fanout=args.fanout,
                                  batch_size=args.batch_size, hidden=args.hidden, prefetch=args.prefetch)  # fmt: skip
    if args.early_stop and not store.split["valid"].numel():
        raise StoreError(f"--early-stop {args.early_stop} goes by validation accuracy, and {path} has no validation nodes")
    if ranks.leads:
        print(f"memory  {line}")
    arrays = [store.indptr, store.indices, store.labels, store.features]
    if args.mode == "pinned-cuda":
        if ranks.local_world < ranks.world:
            raise StoreError("--mode pinned-cuda works on one machine; use cpu-cuda or cuda-cuda across machines")
        arrays = share(arrays, leads=ranks.local_rank == 0, total=ranks.sum if ranks.world > 1 else None)
    indptr, indices, labels, features = place(*arrays, args.mode, ranks.device)
    features = cached(ranks, args, store, features)
    sampler = NeighborSampler(indptr, indices, args.fanout, seed=args.seed, check=False)
    dtype = {"bf16": torch.float32 if is_own(args.model) else torch.bfloat16, "fp64": torch.float64}.get(args.precision, torch.float32)
    in_place = args.model == "sage" and not args.input_dropout and {features.dtype, dtype} <= {torch.float32, torch.bfloat16}
    ring = FeatureRing(features, labels, slots=args.prefetch + 1, device=ranks.device, streams=args.sample_threads,
                       log=tqdm.write if ranks.leads else None, dtype=dtype, gather=gather_rows,
                       aggregate=self_and_mean if in_place else None)  # fmt: skip
    return store, sampler, ring


def cached(ranks, args, store, features):
    """The features behind the cache of --cache, which every process has; without one, as they are.

    On CPU, before a memory-mapped table, it holds the rows that the next batches use soonest; on a GPU and before LMDB,
    whose rows may change, the rows that are used most often, chosen once.
    """
    mapped = args.mode == "cpu-cpu" and isinstance(store.features, MmapFeatures)
    looks_ahead = mapped and lookahead.library() is not None
    if looks_ahead and store.features.large and not args.cache:
        args.cache = free_host_bytes() // (2 * ranks.local_world)
        if ranks.leads:
            print(f"memory  features stay on disk behind a cache of {readable_size(args.cache)}; --cache sets it")
    if not args.cache or not args.mode.startswith("cpu"):  # the other modes read features in place
        return features
    if args.lookahead is not None and not looks_ahead:
        raise StoreError(f"--lookahead {args.lookahead} is for features that are mapped from a file in mode cpu-cpu; here they "
                         f"are {store.meta['backend']} in mode {args.mode}")  # fmt: skip
    with reading_all_edges():
        visits = expected_visits(store.indptr, store.indices, store.split["train"], args.fanout, args.batch_size)
    trim_memory(1)  # what that took, and the cache can have
    if looks_ahead:
        return LookaheadCache(store.features, args.cache, args.lookahead, visits)
    return CachedFeatures(features, visits, args.cache, ranks.device)


def settle(ranks, args, examples):
    """Fill in what depends on the number of training examples, and on nothing that more processes would change."""
    args.total_batch = args.batch_size * args.accumulate * ranks.world
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
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    said = "left alone"
    if args.allocator == "tuned" and ranks.gpus:
        said = f"CUDA {os.environ.get('PYTORCH_CUDA_ALLOC_CONF') or os.environ.get('PYTORCH_ALLOC_CONF') or 'default'}"
    elif args.allocator == "tuned":
        said = "freed memory is kept (mallopt)" if keep_freed_memory() else "no glibc to tune"
        said += f", oneDNN keeps {os.environ.get('ONEDNN_PRIMITIVE_CACHE_CAPACITY', 'all')} products"
    if ranks.leads:
        print(f"memory  allocator: {said}; --allocator system leaves it alone")


def build_model(ranks, args, store, ring):
    """The model with the initial weights of --seed, the same on every rank."""
    torch.manual_seed(args.seed)
    if args.task == "graph":
        mean, std = (0.0, 1.0) if ring.binary else (ring.mean, ring.std)
        return Regressor(store.node_dim, store.edge_dim, args.hidden, store.target_dim, node_dtype=store.node_dtype,
                         edge_dtype=store.edge_dtype, num_layers=args.num_layers, dropout=args.dropout, mean=mean,
                         std=std).to(ranks.device)  # fmt: skip
    if is_own(args.model):
        sizes = store.feature_dim, store.num_classes
        model, args.model_digest = own_model.build(args.model, args.model_args or [], *sizes)
    else:
        model = GNN(store.feature_dim, args.hidden, store.num_classes, conv=args.model, num_layers=args.num_layers,
                    dropout=args.dropout, input_dropout=args.input_dropout, heads=args.heads, norm=args.norm,
                    residual=args.residual, recompute=args.checkpoint_activations)  # fmt: skip
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    model.to(ranks.device, dtype)
    if layerwise(model) and any(layer.uses_degree for layer in model.layers):
        with reading_all_edges():
            model.degrees = graph_degrees(store.indptr, store.indices).to(ranks.device, dtype)
    return model


def run(ranks, args, path):
    """Open, train, evaluate -> (exit code, exact accuracy of each split; None where the run was stopped)."""
    tune(ranks, args)
    state, file = common_state(ranks, args)
    store, sampler, ring = open_data(ranks, args, path)
    if state:
        check_graph(state, file, args, store)
        if args.task == "node":
            store.num_classes = state["graph"]["num_classes"]  # the labels of another graph may lack some
    model = build_model(ranks, args, store, ring)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    best = {"accuracy": -1.0, "epoch": 0, "model": None}  # of --early-stop
    start, first = restore(state, file, ranks, args, model, optimizer, best) if state else (0, 0)
    del state
    parallel = ranks.wrap(model)
    if ranks.leads:
        describe(ranks, args, store, model)
        if file and args.trains and start < args.epochs:
            print(f"resume  from epoch {start + 1}, step {first}")
        elif file:
            print(f"resume  after epoch {start}: nothing is trained")
        if args.checkpoint and args.trains and args.checkpoint != file and os.path.isfile(args.checkpoint):
            print(f"replace {args.checkpoint} holds an earlier run and will be replaced; --resume auto would go on with it")
    if ranks.world > 1 and args.task == "node" and (line := advice(ranks, args, store, model)) and ranks.leads:
        print(line, flush=True)
    report, level = Report(ranks, args), 0

    def save(epoch, step):
        if args.checkpoint and ranks.leads:
            save_checkpoint(args.checkpoint, args, store, model, optimizer, best, epoch, step)

    with ddp.StopSignal(ranks) as stop:
        for epoch in range(start, args.epochs if args.trains else start):
            if args.early_stop and epoch - best["epoch"] >= args.early_stop:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, epoch)
            second = epoch == min(start + 1, args.epochs - 1)  # the one that is drawn and traced
            with profile(report, ranks.rank) if args.profile and second else nullcontext():
                step, stopped, figures, laps = train_epoch(
                    ranks, args, store, sampler, ring, parallel, optimizer, stop, save, epoch, first
                )
            if args.timeline and second and ranks.leads:
                with report.attempt("timeline"):
                    draw_timeline({f"--prefetch {args.prefetch}": laps}, args.timeline)
            if stopped:
                save(epoch, step)
                kept = f"go on with: {args.again}" if args.checkpoint else "nothing kept: no --checkpoint"
                report.tell(f"stopped in epoch {epoch + 1} after step {step}; {kept}", {"stopped": [epoch + 1, step]})
                ranks.barrier()
                return stop.exit_code, None
            valid = validate(ranks, args, store, sampler, ring, model)
            figures = {"epoch": epoch + 1, **figures, "lr": learning_rate(args, epoch), **valid,
                       "peak_bytes": peak_memory(ranks)}  # fmt: skip
            report.tell(epoch_line(args, figures), figures)
            if args.early_stop and figures["valid_sampled"] > best["accuracy"]:
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                best.update(accuracy=figures["valid_sampled"], epoch=epoch + 1, model=weights)
            save(epoch + 1, 0)
            if args.allocator == "tuned" and not ranks.gpus:
                level = trim_memory(level)
            first = 0
    ranks.check_equal(model)
    exact = finish(ranks, args, store, ring, model, best, report)
    return 2 if report.failed & {"profile", "timeline"} else 0, exact


def validate(ranks, args, store, sampler, ring, model):
    """What validation nodes (sampled) or graphs (exact, on one rank) say of the model -> figures."""
    share_buffers(ranks, model)
    if args.task == "graph":
        return {"valid": ring.scores(args, model, store.split["valid"]) if ranks.leads else None}
    figures = {"valid_sampled": sampled_accuracy(ranks, args, sampler, ring, model, store.split["valid"])}
    if isinstance(ring.features, (CachedFeatures, LookaheadCache)):
        figures["cache_hit_rate"] = ring.features.hit_rate
    if isinstance(ring.features, LookaheadCache):
        figures.update(ring.features.counts())
    return figures


def learning_rate(args, epoch):
    """The rate of an epoch, counted from 0; the cosine falls from --lr to 0 over all of --epochs."""
    return args.lr * ((1 + math.cos(math.pi * epoch / args.epochs)) / 2 if args.lr_schedule == "cosine" else 1.0)


def share_buffers(ranks, model):
    """Give every rank the running statistics of rank 0's batch norm."""
    if ranks.world > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


def finish(ranks, args, store, ring, model, best, report):
    """Evaluate the last weights, or the best of --early-stop, exactly -> accuracy of each split; write --predict."""
    if args.task == "graph":
        scores = {name: ring.scores(args, model, ids) for name, ids in store.split.items()} if ranks.leads else {}
        lines = [f"{name:<5}  {scores_line(values)}" for name, values in scores.items()]
        report.tell("\n".join(lines), {"scores": scores})
        report.results({f"exact/{part}_{name}": value for part, values in scores.items() if values
                        for name, value in values.items()}, args.epochs)  # fmt: skip
        ranks.barrier()
        return None
    if best["model"]:
        model.load_state_dict(best["model"])
        if ranks.leads:
            print(f"best    weights of epoch {best['epoch']}: valid {percent(best['accuracy'])} (sampled)")
    if ranks.sum(store.features.large)[0] and not args.predict:  # on any rank: each saw what was free at its start
        line = "exact layer-wise accuracy  n/a: the features do not fit into memory; --predict computes it"
        report.tell(line, {"exact": None})
        return dict.fromkeys(store.split)
    logits = exact_logits(ranks, args, store, model)
    predicted = logits.argmax(1)
    exact = accuracies(store, predicted)
    line = "  ".join(f"{name} {percent(accuracy)}" for name, accuracy in exact.items())
    report.tell(f"exact layer-wise accuracy  {line}", {"exact": exact, "seed": args.seed})
    report.results({f"exact/{name}": accuracy for name, accuracy in exact.items()}, args.epochs)
    if args.predict:
        if args.predict_what == "embeddings":
            logits = exact_logits(ranks, args, store, model, layers=args.num_layers - 1)
        if ranks.leads:
            array = (predicted if args.predict_what == "classes" else logits).numpy()
            write_whole(args.predict, lambda file: np.save(file, array))
    ranks.barrier()
    return exact


def parse_args(argv):
    """The command line, completed by the checkpoint to go on from; see flags.py and checkpoint.py."""
    return flags.parse_args(argv, complete)


def prepare(args):
    """The store directory of --dataset, built on first use."""
    return datasets.prepare(args.dataset, args.root, seed=args.seed, backend=args.backend, symmetrize=args.symmetrize)


def main(argv=None):
    """Run the command line -> exit code."""
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        path = None if ddp.under_torchrun() else prepare(args)
        ddp.launch(worker, max(args.gpus, args.procs), args, path, gpus=args.gpus)
    except StoreError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output is gone, `head` say; the interpreter flushes it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


if __name__ == "__main__":
    sys.exit(main())
