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

import os
import sys

# What has to be in place before torch is imported; spawned ranks inherit it.
if __name__ == "__main__" and not {"system", "--allocator=system"} & set(sys.argv):
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):  # never over the user's own setting
        os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")  # products compiled for one batch's size are not kept:
    os.environ.setdefault("LRU_CACHE_CAPACITY", "1")  # see model.py; 0 is more than this one bears

import argparse
import copy
import ctypes
import functools
import importlib.util
import io
import json
import math
import re
import statistics
import threading
import time
import zipfile
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import datasets
import ddp
from features import Batch, CachedFeatures, CudaCopies, FeatureRing, expected_visits, place, prefetch, share
from model import CONVS, GNN, Regressor, gather_rows, graph_degrees, inference, self_and_mean
from sampler import NeighborSampler, mix
from store import MODES, GraphBatch, GraphDataset, GraphStore, StoreError, choose_mode

STAGES = ("sample", "fetch", "transfer", "forward", "backward", "optimizer", "stall")


class Clock:
    """When each stage began and ended; CUDA work is timed by events, resolved at the end without stopping the GPU."""

    def __init__(self, cuda):
        self.cuda, self.laps, self.events = cuda, [], []  # laps: (stage, start, end, thread or GPU)
        self.zero = time.perf_counter()
        self.first = self.mark() if cuda else None

    def mark(self):
        """A point on the training thread: seconds on CPU, an event of the current stream on CUDA."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, stage, start, end):
        """Record a stage between two marks."""
        if self.cuda:
            self.events.append((stage, start, end))
        else:
            self.add(stage, start, end)

    def add(self, stage, start, end):
        """Record a stage between two times of the host; any thread may call."""
        self.laps.append((stage, start - self.zero, end - self.zero, threading.current_thread().name))

    def resolve(self):
        """Turn events into times; waits for the GPU -> laps."""
        if self.events:
            torch.cuda.synchronize()
        at = lambda event: self.first.elapsed_time(event) / 1e3  # noqa: E731
        self.laps += [(stage, at(start), at(end), "GPU") for stage, start, end in self.events]
        self.events = []
        return self.laps

    def totals(self):
        """Seconds of each stage that was timed."""
        laps = self.resolve()
        found = {name for name, *_ in laps}
        return {stage: sum(b - a for name, a, b, _ in laps if name == stage) for stage in STAGES if stage in found}


def draw_timeline(laps, path, steps=8):
    """Draw a Gantt chart of the first steps: one row for each stage and thread, so that overlap can be seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ends = sorted(b for stage, _, b, _ in laps if stage == "optimizer")
    if not ends:
        return  # an epoch that was resumed at its end has no steps
    until = ends[min(steps, len(ends)) - 1]
    laps = [lap for lap in laps if lap[1] < until]
    rows = sorted({(thread, STAGES.index(stage)) for stage, _, _, thread in laps}, key=lambda row: (row[1], row[0]))
    figure, axis = pyplot.subplots(figsize=(12, 0.4 * len(rows) + 1.2), layout="constrained")
    for stage, a, b, thread in laps:
        number = STAGES.index(stage)
        axis.barh(rows.index((thread, number)), 1e3 * (b - a), left=1e3 * a, color=f"C{number}", edgecolor="white")
    axis.set_yticks(range(len(rows)), [f"{STAGES[number]} ({thread})" for thread, number in rows])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds")
    axis.set_title(f"{min(steps, len(ends))} training steps")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def keep_freed_memory(mmap_threshold=1 << 30, trim_threshold=2**31 - 1):
    """Make glibc keep freed memory up to these many bytes: a fresh large tensor costs more in page faults than in work.

    Returns:
        True where there is a glibc to be told.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(-3, mmap_threshold) and mallopt(-1, trim_threshold))


def trim_memory(level):
    """Give free memory back to the system when the process has grown by 4 %: batches of every size leave pieces of the
    heap unused, between what stays, and these add up over the epochs.

    Args:
        level: resident bytes to compare with; 0 the first time.

    Returns:
        The level for the next time.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    now = trim and int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    if level and now > 1.04 * level:
        trim(0)
    return level or now or 0


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
        torch.manual_seed(mix(mix(args.seed) ^ piece.key))  # dropout, the same on all ranks: it is drawn by node
        batch.wait()
        if batch.began is not None:
            clock.lap("transfer", batch.began, batch.ready)
        t0 = clock.mark()
        output = predict(ranks, args, ring, model, batch)
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


def predict(ranks, args, ring, model, batch):
    """Logits [S, C] of a batch's seeds, or targets of its graphs, computed in --precision; float32, float64 with fp64."""
    with torch.autocast(ranks.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
        if isinstance(ring, GraphReader):
            output = model(batch.blocks[0])
        else:
            x = batch.x.double() if args.precision == "fp64" else batch.x
            output = model(batch.blocks, x, aggregated=ring.first_hop)
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


class GraphReader:
    """Many small graphs in the place of sampler and ring: a batch of seeds is a batch of graphs, read from the store.

    Attributes:
        binary: True where every training target is 0 or 1: then outputs are logits and the loss is cross-entropy.
        mean, std: [T] of the training targets, which losses are measured in.
    """

    first_hop, features = False, None

    def __init__(self, graphs, device, streams):
        self.graphs, self.copies = graphs, CudaCopies(device, streams) if device.type == "cuda" else None
        y = torch.cat([graphs.batch(ids).y for ids in graphs.split["train"].split(1024)]).double()
        self.binary = bool(((y == 0) | (y == 1)).all())
        self.mean, self.std = y.mean(0).float(), y.std(0, correction=0).clamp(min=1e-12).float()
        self.scale = self.std.to(device)

    def stream(self, slot):
        """A context, as that of `FeatureRing`."""
        return self.copies.stream(slot) if self.copies else nullcontext()

    def sample(self, seeds, key, relabel_outer=True):
        """The graphs numbered `seeds`; nothing is drawn."""
        return [self.graphs.batch(seeds)]

    def fetch(self, slot, blocks):
        """Bring the graphs to the training device -> Batch."""
        (graph,) = blocks
        if not self.copies:
            return Batch(blocks, graph.x, graph.y)
        with self.copies.stream(slot):
            graph = GraphBatch(*(self.copies.copy(tensor.pin_memory()) for tensor in graph))
            return Batch([graph], graph.x, graph.y, self.copies.event())

    def loss(self, output, y):
        """Summed over the graphs: cross-entropy, or squared error in units of the targets' standard deviation."""
        if self.binary:
            return F.binary_cross_entropy_with_logits(output, y.float(), reduction="sum")
        return ((output - y) / self.scale).square().sum()

    @torch.no_grad()
    def scores(self, args, model, ids):
        """Figures for the graphs `ids` -> {name: value}; None without graphs. ROC-AUC where targets are 0 or 1."""
        if not ids.numel():
            return None
        model.eval()
        load = lambda part, slot: self.fetch(slot, self.sample(part, 0))  # noqa: E731
        output, y = [], []
        for batch in prefetch(load, ids.split(args.batch_size), depth=args.prefetch, threads=args.sample_threads):
            batch.wait()
            output.append(model(batch.blocks[0]).float().cpu())
            y.append(batch.y.float().cpu())
        output, y = torch.cat(output), torch.cat(y)
        if self.binary:
            return {"roc_auc": roc_auc(output.flatten(), y.flatten())}
        error, plain = output - y, self.mean - y
        return {"rmse": error.square().mean().sqrt().item(), "mae": error.abs().mean().item(),
                "rmse_of_the_mean": plain.square().mean().sqrt().item()}  # fmt: skip


def roc_auc(score, y):
    """Chance that a graph with target 1 scores higher than one with target 0, ties counting half; nan without both."""
    values, rank = score.double().unique(return_inverse=True)
    ones = torch.zeros(len(values), dtype=torch.float64).index_add_(0, rank, y.double())
    zeros = rank.bincount(minlength=len(values)) - ones
    below = zeros.cumsum(0) - zeros / 2
    return ((ones * below).sum() / (ones.sum() * zeros.sum())).item()


def scores_line(scores):
    """{'rmse': 0.71, 'mae': 0.5} -> 'RMSE 0.7100  MAE 0.5000'; None -> 'n/a'."""
    return "n/a" if scores is None else "  ".join(f"{name.replace('rmse', 'RMSE').replace('mae', 'MAE').replace('_', ' ')} "
                                                  f"{value:.4f}" for name, value in scores.items())  # fmt: skip


def save_predictions(path, predicted):
    """Write classes int64 [V] as .npy, atomically."""
    remove_unfinished(path)
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            np.save(file, predicted.numpy())
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError(f"predictions {path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def peak_memory(ranks):
    """Peak bytes of this process: of GPU memory on CUDA, resident memory on CPU."""
    if ranks.gpus:
        return torch.cuda.max_memory_allocated()
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def save_checkpoint(path, args, model, optimizer, schedule, best, epoch, step):
    """Write the state of the run atomically: the last good file or the new one is there, never half of one.

    Sampling and dropout are functions of --seed and the step, so no generator has a state to keep.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step,
             "schedule": schedule.state_dict(), "best": best}  # fmt: skip
    try:
        with open(temporary, "wb") as file:
            torch.save({**state, "run": {**identity(args), "batch_size": args.batch_size}}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise StoreError(f"checkpoint {path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(path):
    """Remove what runs left beside a file when they were killed while they wrote it."""
    path = Path(path)
    for entry in path.absolute().parent.iterdir():
        pid = entry.name.removeprefix(f".{path.name}.")
        if pid.isdigit() and entry.name != pid and not Path("/proc", pid).exists():
            entry.unlink(missing_ok=True)


def identity(args):
    """What a checkpoint must agree on with the run that resumes it."""
    names = ("task", "dataset", "seed", "fanout", "model", "hidden", "num_layers", "heads", "norm", "residual", "dropout",
             "input_dropout", "accumulate")  # fmt: skip
    return {**{name: getattr(args, name) for name in names}, "total_batch": args.total_batch}


def read_checkpoint(path, args):
    """Read and check a checkpoint -> (its bytes, epoch, steps done in it)."""
    try:
        data = Path(path).read_bytes()
        damaged = zipfile.ZipFile(io.BytesIO(data)).testzip()  # torch.load does not look at the checksums
        if damaged:
            raise ValueError(f"{damaged} in it is damaged")
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        saved, epoch, step = state["run"], state["epoch"], state["step"]
    except Exception as error:  # zipfile and torch.load raise a dozen types on a damaged file
        raise StoreError(f"{path} is not a checkpoint of train.py: {(str(error) or repr(error)).splitlines()[0]}") from error
    for name, value in identity(args).items():
        if (was := saved.get(name)) != value and not (args.predict and name == "total_batch"):
            name = "--batch-size x --accumulate x processes =" if name == "total_batch" else f"--{name.replace('_', '-')}"
            raise StoreError(f"checkpoint {path} was made with {name} {was}, this run has {value}")
    return data, epoch, step


def checkpoint_to_resume(args):
    """The file to go on from, or None: --resume auto, and every restart by torchrun, mean that of --checkpoint."""
    own = args.checkpoint if args.checkpoint and Path(args.checkpoint).is_file() else None
    if args.resume == "auto":
        return own
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return own if own and restarted else args.resume


def load_checkpoint(args, ranks, model, optimizer, schedule, best):
    """Bring model, optimizer, schedule and best to the state of a checkpoint -> (epoch, steps done in it); (0, 0) where none is given.

    Machines need not share a disk: the rank that has the most advanced file gives it to the others.
    """
    path = checkpoint_to_resume(args)
    data, epoch, step = read_checkpoint(path, args) if path else (None, 0, 0)
    progress = ranks.gather(-1 if data is None else epoch * args.steps + step)
    if max(progress) < 0:
        return 0, 0
    data = ranks.broadcast(data, progress.index(max(progress)))
    state = torch.load(io.BytesIO(data), map_location=ranks.device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    best.update(state["best"])
    if ranks.leads:
        print(f"resume  from epoch {state['epoch'] + 1}, step {state['step']}")
    return state["epoch"], state["step"]


def flags_of_checkpoint(path):
    """The flags that a checkpoint fixes -> dict; empty where it cannot be read, which `load_checkpoint` then says."""
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["run"]
    except Exception:  # torch.load raises a dozen types on a damaged file
        return {}
    return {name: value for name, value in saved.items() if name != "total_batch"}


def report(ranks, args, figures, line):
    """Print a line, append the figures to --log and write them for TensorBoard, on rank 0."""
    if ranks.leads:
        tqdm.write(line)
        if args.log:
            with open(args.log, "a") as file:
                file.write(json.dumps(figures) + "\n")
        if args.tensorboard and "epoch" in figures:
            writer = tensorboard(args.tensorboard)
            for name, value in figures.items():
                if isinstance(value, float):
                    writer.add_scalar(name, value, figures["epoch"])
            writer.flush()


@functools.lru_cache(maxsize=1)
def tensorboard(folder):
    """TensorBoard's writer for a folder."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def percent(accuracy):
    """0.8123 -> '81.23%'; None -> 'n/a'."""
    return "n/a" if accuracy is None else f"{100 * accuracy:.2f}%"


def epoch_line(args, figures):
    """The dense line of one epoch. Sampling and fetching run beside the rest; `stall` is what they cost."""
    stages = "  ".join(f"{stage} {figures[stage]:.2f}" for stage in (*STAGES, "exchange") if stage in figures)
    from_step = f" from step {figures['first_step'] + 1}" if figures["first_step"] else ""
    valid = scores_line(figures["valid"]) if "valid" in figures else f"{percent(figures['valid_sampled'])} (sampled)"
    return (
        f"epoch {figures['epoch']:>3}/{args.epochs}{from_step}  loss {figures['loss']:.4f}  valid {valid}  {figures['seconds']:.2f} s  "
        f"{figures['seeds_per_s']:,.0f} seeds/s  [{stages} s]  peak {figures['peak_bytes'] / 2**30:.2f} GiB"
    )


def describe(ranks, args, store, model):
    """Print every derived quantity before the work starts."""
    parameters = f"{sum(p.numel() for p in model.parameters()):,} parameters"
    split = " / ".join(f"{name} {nodes.numel():,}" for name, nodes in store.split.items())
    threads = f"{torch.get_num_threads()} CPU threads each"
    if ranks.gpus and ranks.world > 1:
        threads += f", rank 0 on cores {min(os.sched_getaffinity(0))}-{max(os.sched_getaffinity(0))}, next to its GPU"
    where = f"{ranks.world} x {torch.cuda.get_device_name() if ranks.gpus else 'CPU'}"
    if args.task == "graph":
        lines = (
            f"graphs  {store.path}: {len(store):,} graphs; {split}",
            f"model   edge-gated regressor, {args.num_layers} layers, hidden {args.hidden}, {parameters}",
        )
    else:
        lines = (
            f"graph   {store.path}: {store.num_nodes:,} nodes, {store.num_edges:,} edges, "
            f"{store.feature_dim} features, {store.num_classes} classes; {split}",
            f"model   {args.model}, {args.num_layers} layers, hidden {args.hidden}, {parameters}; "
            f"fanout {','.join(map(str, args.fanout))} from the seeds outward",
        )
    for line in (
        *lines,
        f"run     {where}, mode {args.mode}, {args.precision}, {threads}; batch {args.batch_size} x "
        f"{ranks.world}{f' x {args.accumulate}' if args.accumulate > 1 else ''} = {args.total_batch} seeds, {args.steps} steps an epoch",
        f"links   {ddp.gpu_links(ranks.gpus) or 'nvidia-smi topo -m does not say'}" if ranks.gpus > 1 else None,
    ):
        if line:
            print(line, flush=True)


def work_of_a_step(args, store, model):
    """Expected (floating-point operations, bytes of gathered rows) of an optimizer step over all its seeds."""
    rows = min(args.total_batch, store.split["train"].numel())
    degree = store.num_edges / max(1, store.num_nodes)
    operations = moved = 0
    for k, layer in zip(args.fanout, reversed(model.layers), strict=True):
        edges = rows * (min(k, degree) if k >= 0 else degree)
        weights = sum(parameter.numel() for parameter in layer.parameters())
        operations += 6 * rows * weights  # a product and its two gradients
        moved += 12 * edges * (store.feature_dim if layer is model.layers[0] else args.hidden)
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
    return (f"advice  a step of {min(args.total_batch, store.split['train'].numel()):,} seeds is about {1e3 * alone:.1f} ms of work for one "
            f"process; {ranks.world} take {1e3 * (together - exchange):.1f} ms and {1e3 * exchange:.1f} ms to exchange "
            f"{gradients.nbytes / 1e6:.1f} MB of gradients{'' if ranks.gpus else ', on the same cores'}: one will be faster")  # fmt: skip


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


@contextmanager
def profile(ranks, args):
    """Trace what runs inside with torch.profiler -> --profile FILE, with the rank in its name."""
    with torch.profiler.profile() as trace:
        yield
    path = Path(args.profile)
    trace.export_chrome_trace(str(path.with_name(f"{path.stem}.rank{ranks.rank}.json")))


def fanout(text):
    """Parse '15,10,5'."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(k == 0 or k < -1 for k in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: write positive numbers, or -1 for all neighbours, as in 15,10,5")
    return numbers


def size(text):
    """Parse '4GiB', '512MiB' or a number of bytes."""
    units = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 1e3, "mb": 1e6, "gb": 1e9, "": 1}
    found = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip().lower())
    try:
        return int(float(found[1]) * units[found[2]])
    except (TypeError, KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 4GiB, 512MiB or a number of bytes") from None


def positive(kind, zero=False):
    """An argparse type: a finite number above 0 (or from 0 on)."""

    def parse(text):
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not (0 <= number < float("inf")) or (number == 0 and not zero):
            word = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {word} {'of at least' if zero else 'above'} 0")
        return number

    return parse


class _Defaults(argparse.HelpFormatter):
    """Show a default where there is one to show."""

    def _get_help_string(self, action):
        says = action.help and "default" not in action.help and action.default not in (None, False, argparse.SUPPRESS)
        return f"{action.help} (default: %(default)s)" if says else action.help


def parse_args(argv):
    """Parse the command line; argparse exits with code 2 and one line on bad input."""
    parser, argv = make_parser(), spelled_out(argv)
    args = parser.parse_args(argv)
    if path := checkpoint_to_resume(args):  # what the checkpoint fixes need not be said again
        parser.set_defaults(**flags_of_checkpoint(path))
        args = parser.parse_args(argv)
    check_args(parser, args)
    return args


def make_parser():
    """Every flag, in groups; --help fits on two screens."""
    parser = argparse.ArgumentParser(usage="python train.py [flags]", formatter_class=_Defaults,
                                     description="Train a graph neural network by neighbour sampling.")  # fmt: skip
    count, number, from_zero = positive(int), positive(float), positive(float, zero=True)

    add = parser.add_argument_group("data").add_argument
    add("--task", default="node", choices=["node", "graph"], help="classes of nodes, or targets of many small graphs")
    add("--dataset", default="synthetic", metavar="NAME", help="synthetic, synthetic:nodes=..., a store folder, an .npz file, "
        "cora, citeseer, pubmed, ogbn-arxiv, ogbn-products, ogbn-papers100M (default: %(default)s)")  # fmt: skip
    add("--root", default="data", metavar="DIR", help="folder for downloads and built stores")
    add("--backend", default="mmap", choices=["mmap", "lmdb"], help="how a newly built store keeps features")

    add = parser.add_argument_group("sampling").add_argument
    add("--fanout", type=fanout, metavar="15,10,5", help="neighbours taken by each seed, then by each of those, ...; -1 takes all; "
        "PyG's order, DGL lists the same as 5,10,15 (default: 10 a layer)")  # fmt: skip
    add("--batch-size", type=count, default=1024, metavar="N", help="seeds of a process in one pass")
    add("--accumulate", type=count, default=1, metavar="N", help="passes whose gradients make one optimizer step")

    add = parser.add_argument_group("model").add_argument
    add("--model", default="sage", choices=list(CONVS), help="GraphSAGE (mean or max-pooling), GCN, GATv2, GIN")
    add("--hidden", type=count, default=128, metavar="N", help="width of the inner layers, all heads together")
    add("--num-layers", type=count, metavar="N", help="layers (default: one for each fanout, else 3)")
    add("--heads", type=count, default=4, metavar="N", help="attention heads of gat")
    add("--norm", default="none", choices=["none", "layer", "batch"], help="after each inner layer")
    add("--residual", action="store_true", help="add each layer's input to its output")
    add("--dropout", type=from_zero, default=0.5, metavar="P", help="probability after each inner layer and of gat's attention")
    add("--input-dropout", type=from_zero, default=0.0, metavar="P", help="probability of the features (default: 0)")

    add = parser.add_argument_group("optimisation").add_argument
    add("--lr", type=number, default=0.003, metavar="RATE", help="Adam's learning rate")
    add("--lr-schedule", default="constant", choices=["constant", "cosine"], help="cosine: falls to 0 over --epochs")
    add("--weight-decay", type=from_zero, default=0.0, metavar="X", help="Adam's L2 term (default: 0)")
    add("--epochs", type=count, default=10, metavar="N", help="passes over the training nodes")
    add("--early-stop", type=count, metavar="N", help="end after N epochs without a better sampled validation accuracy and take "
        "the best epoch's weights (default: off)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="fixes weights, order, sampling and dropout")
    add("--runs", type=count, default=1, metavar="N", help="train with N seeds from --seed on; mean and standard deviation")
    add("--precision", default="fp32", choices=["fp32", "tf32", "bf16", "fp64"], help="of the matrix products; tf32 is for "
        "CUDA, fp64 for comparing runs")  # fmt: skip
    add("--checkpoint-activations", action="store_true", help="compute inner layers again in the backward pass instead of "
        "keeping them: less memory, more time")  # fmt: skip

    add = parser.add_argument_group("processes and placement").add_argument
    add("--gpus", type=positive(int, zero=True), metavar="N", help="GPUs, one process each; 0 trains on CPU (default: 1 when "
        "there is one)")  # fmt: skip
    add("--procs", type=count, default=1, metavar="N", help="processes with --gpus 0; they share the cores")
    add("--mode", default="auto", choices=["auto", *MODES], help="where graph and features live - where training runs")
    add("--gpu-cache", "--cache", dest="cache", type=size, default=0, metavar="4GiB", help="memory for the hottest feature rows: "
        "of each GPU in mode cpu-cuda, of the host before an lmdb store in mode cpu-cpu (default: none)")  # fmt: skip
    add("--prefetch", type=positive(int, zero=True), default=2, metavar="N", help="batches prepared ahead; 0: none")
    add("--sample-threads", type=count, default=1, metavar="N", help="threads that sample and fetch")
    add("--allocator", default="tuned", choices=["tuned", "system"], help="tuned: on CPU freed memory is kept, on CUDA segments "
        "can grow; system: as it comes")  # fmt: skip

    add = parser.add_argument_group("files").add_argument
    add("--checkpoint", metavar="FILE", help="write the run's state here after each epoch and on Ctrl-C")
    add("--checkpoint-every", type=count, metavar="STEPS", help="and after so many optimizer steps (default: off)")
    add("--resume", metavar="FILE", help="go on from a checkpoint; data, sampling and model flags are the checkpoint's; auto: "
        "from that of --checkpoint, once it is there")  # fmt: skip
    add("--predict", metavar="FILE.npy", help="write the class of every node, int64 [V], from exact inference; with --resume nothing "
        "is trained")  # fmt: skip
    add("--log", "--log-file", metavar="FILE", help="append one JSON line an epoch (under torchrun write --log-file)")
    add("--tensorboard", metavar="DIR", help="write the epochs' figures for TensorBoard")
    add("--timeline", metavar="FILE.png", help="draw the first steps of the second epoch as a Gantt chart")
    add("--profile", metavar="FILE", help="write a torch.profiler trace of the second epoch, one a rank")
    return parser


def spelled_out(argv):
    """--batch_size 8 -> --batch-size 8; --fanout -1,5 -> --fanout=-1,5, which argparse would take for a flag."""
    words = []
    for word in argv:
        if words and words[-1] == "--fanout":
            words[-1] += f"={word}"
        else:
            name, equals, value = word.partition("=")
            words.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    return words


def check_args(parser, args):
    """Fill in what depends on other flags and on the machine; refuse what cannot work, before anything is loaded."""
    if args.fanout is None:
        args.fanout = [10] * (args.num_layers or 3)
    args.num_layers = args.num_layers or len(args.fanout)
    if len(args.fanout) != args.num_layers:
        parser.error(f"--fanout {','.join(map(str, args.fanout))} has {len(args.fanout)} hops, --num-layers is "
                     f"{args.num_layers}; give one fanout for each layer")  # fmt: skip
    for flag in ("dropout", "input_dropout"):
        if getattr(args, flag) >= 1:
            parser.error(f"--{flag.replace('_', '-')} {getattr(args, flag)} must be below 1")
    if args.cache and args.mode in ("cuda-cuda", "pinned-cuda"):
        parser.error(f"--gpu-cache is for --mode cpu-cuda (or an lmdb store on CPU); {args.mode} reads features in place")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.gpus is None:
        args.gpus = min(there, 1) if args.procs == 1 and args.mode != "cpu-cpu" else 0
    if args.gpus > there:
        parser.error(f"--gpus {args.gpus}: this machine has {there} usable; give {f'at most {there}' if there else '--gpus 0'}")
    if args.gpus and args.procs > 1:
        parser.error(f"--procs {args.procs} is for --gpus 0; with GPUs there is one process for each")
    if args.mode.endswith("cuda") and not args.gpus:
        parser.error(f"--mode {args.mode} needs a CUDA GPU and --gpus 1 or more; --mode cpu-cpu works here")
    if args.mode == "cpu-cpu" and args.gpus:
        parser.error(f"--mode cpu-cpu trains on CPU: give --gpus 0 instead of --gpus {args.gpus}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed {args.seed}: give a whole number from 0 to 2^63 - 1")
    for flag, off in (("early_stop", None), ("predict", None), ("runs", 1)):
        if args.task == "graph" and getattr(args, flag) != off:
            parser.error(f"--{flag.replace('_', '-')} {getattr(args, flag)} is for --task node")
    if args.precision == "fp64" and args.task == "graph":
        parser.error("--precision fp64 is for --task node; use fp32 or bf16")
    if args.precision == "tf32" and not args.gpus:
        parser.error("--precision tf32 needs a CUDA GPU; use fp32 or bf16 on CPU")
    if args.model == "gat" and args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} cannot be shared by --heads {args.heads}: give a multiple of {args.heads}")
    if args.norm == "batch" and args.checkpoint_activations:
        parser.error("--checkpoint-activations would count each batch twice in --norm batch; use --norm layer")
    for flag in ("checkpoint", "resume", "predict", "timeline", "profile"):
        if args.runs > 1 and getattr(args, flag):
            parser.error(f"--{flag} {getattr(args, flag)} is for one run, --runs is {args.runs}")
    for flag in ("checkpoint", "predict", "log", "timeline", "profile"):
        if getattr(args, flag) is None:
            continue
        path = Path(getattr(args, flag)).absolute()
        if not path.parent.is_dir():
            parser.error(f"--{flag} {getattr(args, flag)}: the folder {path.parent} does not exist")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            parser.error(f"--{flag} {getattr(args, flag)}: a file cannot be written there")
    if args.predict and not args.predict.endswith(".npy"):
        parser.error(f"--predict {args.predict}: the classes are written as .npy; give a name that ends in .npy")
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        parser.error("--tensorboard needs tensorboard: pip install tensorboard")
    if args.timeline and not args.timeline.endswith(".png"):
        parser.error(f"--timeline {args.timeline}: the picture is a PNG; give a name that ends in .png")
    if args.timeline and importlib.util.find_spec("matplotlib") is None:
        parser.error("--timeline needs matplotlib: pip install matplotlib")
    if args.checkpoint_every and not args.checkpoint:
        parser.error(f"--checkpoint-every {args.checkpoint_every} needs --checkpoint FILE to write to")
    if args.resume == "auto" and not args.checkpoint:
        parser.error("--resume auto goes on from the file of --checkpoint, which is not given")
    if args.resume not in (None, "auto") and not Path(args.resume).is_file():
        parser.error(f"--resume {args.resume}: no such file")


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
