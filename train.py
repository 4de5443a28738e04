"""Train a graph neural network by neighbour sampling.

    python train.py                                                  # built-in synthetic graph, no download
    python train.py --dataset ogbn-products --fanout 15,10,5         # one GPU when there is one, else the CPU
    python train.py --gpus 4 --dataset ogbn-products                 # four GPUs of this machine
    python train.py --gpus 0 --procs 2 --dataset my_graph.npz        # two CPU processes
    python train.py --task graph --dataset molecules.npz             # a number for each of many small graphs
    python train.py --dataset cora --model gat --heads 8 --runs 10   # mean and standard deviation over ten seeds
    python train.py --resume run.pt --predict classes.npy            # classes of all nodes from a checkpoint
    torchrun --nproc-per-node 4 train.py --gpus 4 --dataset ogbn-products
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py --gpus 4 --dataset ogbn-products

One step is sample -> fetch -> forward -> backward, all on one screen in `train_epoch`; the first two run ahead on
threads. Every file beside this one does one of these things and can be copied alone.
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
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import datasets
import ddp
from allocator import keep_freed_memory, trim_memory
from checkpoint import load_checkpoint, remove_unfinished, save_checkpoint, save_predictions
from disk import StoreError
from features import CachedFeatures, FeatureRing, expected_visits, place, prefetch, share
from flags import parse_args
from graphs import GraphDataset, GraphReader, Regressor, scores_line
from model import GNN, gather_rows, graph_degrees, inference, self_and_mean
from plan import advice, choose_mode
from report import Clock, describe, draw_timeline, epoch_line, peak_memory, percent, profile, report
from sampler import NeighborSampler, mix
from store import GraphStore


def seeds_of_epoch(store, args, epoch):
    """The training nodes in this epoch's order, int64; a function of --seed and epoch alone, the same on all ranks."""
    nodes = store.split["train"]
    generator = torch.Generator().manual_seed(mix(args.seed) ^ epoch)
    return nodes[torch.randperm(nodes.numel(), generator=generator)]


class Piece(NamedTuple):
    """This rank's share of one pass forward and backward."""

    step: int  # optimizer step within the epoch
    key: int  # of the sampling and the dropout: the number of the optimizer step in the whole run
    seeds: torch.Tensor  # this rank's
    total: int  # seeds of the whole optimizer step: all ranks, all passes
    last: bool  # the optimizer follows


def pieces(ranks, args, nodes, epoch, first=0):
    """Cut an epoch's nodes into optimizer steps, passes and ranks, from step `first`; no node twice, none left out."""
    total = args.total_batch
    for step in range(first, args.steps):
        everyone = nodes[step * total : (step + 1) * total]
        for i, part in enumerate(everyone.tensor_split(args.accumulate)):
            seeds = part[ranks.part(part.numel())]
            yield Piece(step, epoch * args.steps + step, seeds, everyone.numel(), i == args.accumulate - 1)


def train_epoch(ranks, args, store, sampler, ring, model, optimizer, stop, save, epoch, first):
    """Run the steps of one epoch from step `first` -> (steps done in the epoch, stopped early, figures, laps)."""
    model.train()
    clock, loss_sum, count, done = Clock(ranks.gpus), torch.zeros((), dtype=torch.float64, device=ranks.device), 0, first

    def load(piece, slot):
        start = time.perf_counter()
        with ring.stream(slot):
            blocks = sampler.sample(piece.seeds, piece.key, relabel_outer=not ring.first_hop)
            sampled = time.perf_counter()
            batch = ring.fetch(slot, blocks)
        clock.add("sample", start, sampled)
        clock.add("fetch", sampled, time.perf_counter())
        return piece, batch

    work = pieces(ranks, args, seeds_of_epoch(store, args, epoch), epoch, first)
    loader = prefetch(load, work, depth=args.prefetch, threads=args.sample_threads)
    bar = tqdm(total=args.steps, initial=first, desc=f"epoch {epoch + 1}", leave=False, unit="step",
               disable=None if ranks.leads else True)  # None: no bar where stderr is not a terminal
    waiting = time.perf_counter()
    for piece, batch in loader:
        clock.add("stall", waiting, time.perf_counter())
        batch.wait()
        if batch.began is not None:
            clock.lap("transfer", batch.began, batch.ready)
        t0 = clock.mark()
        output = predict(ranks, args, ring, model, batch, mix(mix(args.seed) ^ piece.key))
        if args.task == "graph":
            loss = ring.loss(output, batch.y)
        else:
            loss = F.cross_entropy(output, batch.y, reduction="sum")
        t1 = clock.mark()
        with nullcontext() if piece.last or ranks.world == 1 else model.no_sync():
            # ranks average their gradients: so each seed weighs 1 / total, whatever rank and pass it is in
            (loss * (ranks.world / piece.total)).backward()
        t2 = clock.mark()
        clock.lap("forward", t0, t1)
        clock.lap("backward", t1, t2)
        loss_sum += loss.detach()
        count += batch.y.numel()
        if piece.last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            clock.lap("optimizer", t2, clock.mark())
            done = piece.step + 1
            bar.update()
            if args.checkpoint_every and (piece.key + 1) % args.checkpoint_every == 0:
                save(epoch, done)
            if stop.agreed():
                break
        waiting = time.perf_counter()
    loader.close()
    bar.close()
    stages = clock.totals()
    seconds = time.perf_counter() - clock.zero
    loss_sum, count = ranks.sum(loss_sum.item(), count)
    if ranks.world > 1:
        stages["exchange"] = ranks.exchange(model) * (done - first)
    figures = {"first_step": first, "loss": loss_sum / max(count, 1), "seconds": seconds, "seeds_per_s": count / seconds, **stages}
    return done, stop.answer, figures, clock.laps


def predict(ranks, args, ring, model, batch, key=None):
    """Logits [S, C] of a batch's seeds, or targets of its graphs, computed in --precision; float32, float64 with fp64.

    In training, dropout is a function of the key: the same on all ranks, where it is drawn by node.
    """
    with torch.autocast(ranks.device.type, torch.bfloat16) if args.precision == "bf16" else nullcontext():
        if isinstance(ring, GraphReader):
            if key is not None:
                torch.manual_seed(key)
            output = model(batch.blocks[0])
        else:
            x = batch.x.double() if args.precision == "fp64" else batch.x
            output = model(batch.blocks, x, aggregated=ring.first_hop, key=key)
    return output.to(torch.promote_types(output.dtype, torch.float32))


@torch.no_grad()
def sampled_accuracy(ranks, args, sampler, ring, model, nodes):
    """Accuracy on nodes through sampled neighbourhoods: an estimate that costs a batch or two; None without nodes."""
    if not nodes.numel():
        return None
    model.eval()
    mine = nodes[ranks.part(nodes.numel())].split(args.batch_size)
    right = 0

    def load(seeds, slot):
        with ring.stream(slot):
            return ring.fetch(slot, sampler.sample(seeds, -1, relabel_outer=not ring.first_hop))

    for batch in prefetch(load, mine, depth=args.prefetch, threads=args.sample_threads):
        batch.wait()
        right += (predict(ranks, args, ring, model, batch).argmax(1) == batch.y).sum()
    return ranks.sum(int(right))[0] / nodes.numel()


def exact_logits(ranks, args, store, model):
    """Logits [V, C] of all nodes from exact layer-wise inference in float32, split over the ranks of each machine."""
    model = copy.deepcopy(model).float() if args.precision == "fp64" else model
    features = getattr(store.features, "tensor", store.features)
    total = functools.partial(machine_sum, ranks) if ranks.local_world > 1 else None
    try:
        return inference(model, store.indptr, store.indices, features, rank=ranks.local_rank, world=ranks.local_world, total=total)
    except OSError as error:
        raise StoreError(f"no exact inference: {error}") from error


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


def worker(ranks, args, path):
    """One rank's whole work -> exit code; what is wrong with the input is said in one sentence."""
    try:
        return run(ranks, args, path)[0] if args.runs == 1 else run_many(ranks, args, path)
    except StoreError as error:
        if ranks.leads or path is None:
            print(f"train.py: {error}", file=sys.stderr)
        return 2


def run_many(ranks, args, path):
    """--runs with seeds one after the other, each drawing its own split where the data set has none -> exit code."""
    exact = []
    for seed in range(args.seed, args.seed + args.runs):
        folder = args.tensorboard and str(Path(args.tensorboard, f"seed{seed}"))
        code, accuracy = run(ranks, argparse.Namespace(**{**vars(args), "seed": seed, "tensorboard": folder}), path)
        if code:
            return code
        exact.append(accuracy)
        path = None  # of the next seed
    columns = {name: [accuracy[name] for accuracy in exact] for name in exact[0] if exact[0][name] is not None}
    mean = {name: statistics.mean(values) for name, values in columns.items()}
    std = {name: statistics.stdev(values) for name, values in columns.items()}
    line = "  ".join(f"{name} {100 * mean[name]:.2f} +- {100 * std[name]:.2f}%" for name in mean)
    report(ranks, args, {"runs": args.runs, "mean": mean, "std": std}, f"exact accuracy over {args.runs} seeds  {line}")
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
    args.total_batch = args.batch_size * args.accumulate * ranks.world
    if args.task == "graph":
        args.mode, graphs = "store", GraphDataset.open(path)
        if not graphs.split["train"].numel():
            raise StoreError(f"{path} has no training graphs; build it with a split")
        args.steps = -(-graphs.split["train"].numel() // args.total_batch)
        reader = GraphReader(graphs, ranks.device, args.sample_threads)
        return graphs, reader, reader
    store = GraphStore.open(path)
    args.mode, line = choose_mode(store, args.gpus, args.mode, procs=ranks.local_world, fanout=args.fanout,
                                  batch_size=args.batch_size, hidden=args.hidden, prefetch=args.prefetch)  # fmt: skip
    args.steps = -(-store.split["train"].numel() // args.total_batch)
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
    if args.cache and args.mode.startswith("cpu"):  # the other modes read features in place
        visits = expected_visits(store.indptr, store.indices, store.split["train"], args.fanout, args.batch_size)
        features = CachedFeatures(features, visits, args.cache, ranks.device)
    sampler = NeighborSampler(indptr, indices, args.fanout, seed=args.seed, check=False)
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(args.precision, store.features.dtype)
    ring = FeatureRing(features, labels, slots=args.prefetch + 1, device=ranks.device, streams=args.sample_threads,
                       log=tqdm.write if ranks.leads else None, dtype=dtype, gather=gather_rows,
                       aggregate=self_and_mean if args.model == "sage" and not args.input_dropout else None)  # fmt: skip
    return store, sampler, ring


def tune(ranks, args):
    """Allocator and precision settings, each said in one line."""
    if args.precision is None:
        has_tf32 = ranks.gpus and torch.cuda.get_device_capability(ranks.device) >= (8, 0)
        args.precision = "tf32" if has_tf32 else "fp32"
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    said = "as it comes"
    if args.allocator == "tuned":
        said = f"CUDA {os.environ.get('PYTORCH_CUDA_ALLOC_CONF') or os.environ.get('PYTORCH_ALLOC_CONF') or 'default'}"
        if not ranks.gpus:
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
    model = GNN(store.feature_dim, args.hidden, store.num_classes, conv=args.model, num_layers=args.num_layers,
                dropout=args.dropout, input_dropout=args.input_dropout, heads=args.heads, norm=args.norm,
                residual=args.residual, recompute=args.checkpoint_activations)  # fmt: skip
    model.to(ranks.device, torch.float64 if args.precision == "fp64" else torch.float32)
    if any(layer.uses_degree for layer in model.layers):
        model.degrees = graph_degrees(store.indptr, store.indices).to(ranks.device)
    return model


def run(ranks, args, path):
    """Open, train, evaluate -> (exit code, exact accuracy of each split; None where the run was stopped)."""
    tune(ranks, args)
    store, sampler, ring = open_data(ranks, args, path)
    model = build_model(ranks, args, store, ring)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    cosine = lambda epoch: (1 + math.cos(math.pi * epoch / args.epochs)) / 2  # noqa: E731
    schedule = LambdaLR(optimizer, cosine if args.lr_schedule == "cosine" else lambda epoch: 1.0)
    best = {"accuracy": -1.0, "epoch": 0, "model": None}  # of --early-stop
    start, first = load_checkpoint(args, ranks, model, optimizer, schedule, best)
    epochs = start if args.predict and args.resume else args.epochs
    parallel = ranks.wrap(model)
    if ranks.leads:
        describe(ranks, args, store, model)
    if ranks.world > 1 and args.task == "node" and (line := advice(ranks, args, store, model)) and ranks.leads:
        print(line, flush=True)

    def save(epoch, step):
        if args.checkpoint and ranks.leads:
            save_checkpoint(args.checkpoint, args, model, optimizer, schedule, best, epoch, step)

    if args.checkpoint and ranks.leads:
        remove_unfinished(args.checkpoint)
    level = 0
    with ddp.StopSignal(ranks) as stop:
        for epoch in range(start, epochs):
            if args.early_stop and epoch - best["epoch"] >= args.early_stop:
                break
            second = epoch == min(start + 1, args.epochs - 1)  # the one that is drawn and traced
            with profile(ranks, args) if args.profile and second else nullcontext():
                step, stopped, figures, laps = train_epoch(
                    ranks, args, store, sampler, ring, parallel, optimizer, stop, save, epoch, first
                )
            if args.timeline and second and ranks.leads:
                draw_timeline(laps, args.timeline)
            if not stopped:
                share_buffers(ranks, model)
                if args.task == "graph":  # exact, on one rank
                    valid = {"valid": ring.scores(args, model, store.split["valid"]) if ranks.leads else None}
                else:
                    valid = {"valid_sampled": sampled_accuracy(ranks, args, sampler, ring, model, store.split["valid"])}
                figures = {"epoch": epoch + 1, **figures, "lr": schedule.get_last_lr()[0], **valid,
                           "peak_bytes": peak_memory(ranks)}  # fmt: skip
                if isinstance(ring.features, CachedFeatures):
                    figures["cache_hit_rate"] = ring.features.hit_rate
                report(ranks, args, figures, epoch_line(args, figures))
                schedule.step()
                if args.early_stop and figures["valid_sampled"] > best["accuracy"]:
                    weights = {name: value.clone() for name, value in model.state_dict().items()}
                    best.update(accuracy=figures["valid_sampled"], epoch=epoch + 1, model=weights)
            save(epoch, step) if stopped else save(epoch + 1, 0)
            if args.allocator == "tuned" and not ranks.gpus:
                level = trim_memory(level)
            if stopped:
                kept = f"resume with --resume {args.checkpoint}" if args.checkpoint else "nothing kept: no --checkpoint"
                report(ranks, args, {"stopped": [epoch + 1, step]}, f"stopped in epoch {epoch + 1} after step {step}; {kept}")
                ranks.barrier()
                return stop.exit_code, None
            first = 0
    ranks.check_equal(model)
    if args.task == "graph":
        scores = {name: ring.scores(args, model, ids) for name, ids in store.split.items()} if ranks.leads else {}
        line = "\n".join(f"{name:<5}  {scores_line(values)}" for name, values in scores.items())
        report(ranks, args, {"scores": scores}, line)
        ranks.barrier()
        return 0, None
    return 0, finish(ranks, args, store, model, best)


def share_buffers(ranks, model):
    """Give every rank the running statistics of rank 0's batch norm."""
    if ranks.world > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


def finish(ranks, args, store, model, best):
    """Evaluate the last weights, or the best of --early-stop, exactly -> accuracies; write --predict."""
    if best["model"]:
        model.load_state_dict(best["model"])
        if ranks.leads:
            print(f"best    weights of epoch {best['epoch']}: valid {percent(best['accuracy'])} (sampled)")
    if ranks.sum(store.features.large)[0] and not args.predict:  # on any rank: each looked at what was free when it opened them
        line = "exact layer-wise accuracy  n/a: the features do not fit into memory; --predict computes it"
        report(ranks, args, {"exact": None}, line)
        return dict.fromkeys(store.split)
    predicted = exact_logits(ranks, args, store, model).argmax(1)
    exact = accuracies(store, predicted)
    line = "  ".join(f"{name} {percent(accuracy)}" for name, accuracy in exact.items())
    report(ranks, args, {"exact": exact, "seed": args.seed}, f"exact layer-wise accuracy  {line}")
    if args.predict and ranks.leads:
        save_predictions(args.predict, predicted)
    ranks.barrier()
    return exact


def prepare(args):
    """The store directory of --dataset, built on first use."""
    return datasets.prepare(args.dataset, args.root, seed=args.seed, backend=args.backend)


def main(argv=None):
    """Run the command line -> exit code."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
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
