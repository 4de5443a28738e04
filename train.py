"""Train GraphSAGE by neighbour sampling.

    python train.py                                                  # built-in synthetic graph, no download
    python train.py --dataset ogbn-products --fanout 15,10,5         # one GPU when there is one, else the CPU
    python train.py --gpus 4 --dataset ogbn-products                 # four GPUs of this machine
    python train.py --gpus 0 --procs 2 --dataset my_graph.npz        # two CPU processes
    torchrun --nproc-per-node 4 train.py --gpus 4 --dataset ogbn-products
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint HOST:29500 train.py --gpus 4 --dataset ogbn-products

One step is sample -> fetch -> forward -> backward, all on one screen in `train_epoch`; the first two run ahead on
threads. Every file beside this one does one of these things and can be copied alone.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm import tqdm

import datasets
import ddp
from features import FeatureRing, prefetch
from model import SAGE, inference
from sampler import NeighborSampler, mix
from store import GraphStore, StoreError

STAGES = ("sample", "fetch", "wait", "forward", "backward", "optimizer")


class Clock:
    """Seconds spent in each stage; CUDA work is timed by events, resolved at the end without stopping the GPU."""

    def __init__(self, cuda):
        self.cuda, self.laps, self.events = cuda, [], []

    def now(self):
        """A point on the training thread: a time on CPU, an event on CUDA."""
        return torch.cuda.current_stream().record_event(torch.cuda.Event(True)) if self.cuda else time.perf_counter()

    def lap(self, stage, start, end):
        """Record a stage between two points of `now`."""
        self.events.append((stage, start, end)) if self.cuda else self.add(stage, end - start)

    def add(self, stage, seconds):
        """Record host seconds; any thread may call."""
        self.laps.append((stage, seconds))

    def totals(self):
        """Sum the laps -> {stage: seconds}, and forget them."""
        if self.cuda:
            torch.cuda.synchronize()
            self.laps += [(stage, a.elapsed_time(b) / 1e3) for stage, a, b in self.events]
        totals = {stage: sum(s for name, s in self.laps if name == stage) for stage in STAGES}
        self.laps, self.events = [], []
        return totals


def keep_freed_memory(mmap_threshold=1 << 30, trim_threshold=1 << 30):
    """Make glibc keep freed memory up to these many bytes: a fresh large tensor costs more in page faults than in work.

    Returns:
        True where there is a glibc to be told.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(-3, mmap_threshold) and mallopt(-1, trim_threshold))


def seeds_of_epoch(store, args, epoch):
    """The training nodes in this epoch's order, int64; a function of --seed and epoch alone, the same on all ranks."""
    nodes = store.split["train"]
    generator = torch.Generator().manual_seed(mix(args.seed) ^ epoch)
    return nodes[torch.randperm(nodes.numel(), generator=generator)]


def batches(ranks, nodes, batch_size, first=0):
    """Cut nodes into steps -> yields (step, this rank's seeds, seeds of all ranks together); none twice, none left out."""
    total = batch_size * ranks.world
    for step, start in enumerate(range(0, nodes.numel(), total)):
        if step >= first:
            everyone = nodes[start : start + total]
            yield step, everyone[ranks.part(everyone.numel())], everyone.numel()


def train_epoch(ranks, args, store, sampler, ring, model, optimizer, stop, epoch, first):
    """Run the steps of one epoch from step `first` -> (steps done in the epoch, stopped early, figures)."""
    model.train()
    clock, per_epoch = Clock(ranks.gpus), -(-store.split["train"].numel() // (args.batch_size * ranks.world))
    loss_sum, count, step = torch.zeros((), device=ranks.device), 0, first - 1

    def load(item, slot):
        step, seeds, total = item
        start = time.perf_counter()
        blocks = sampler.sample(seeds, epoch * per_epoch + step)
        sampled = time.perf_counter()
        batch = ring.fetch(slot, blocks)
        clock.add("sample", sampled - start)
        clock.add("fetch", time.perf_counter() - sampled)
        return step, total, batch

    steps = batches(ranks, seeds_of_epoch(store, args, epoch), args.batch_size, first)
    bar = tqdm(total=per_epoch, initial=first, desc=f"epoch {epoch + 1}", leave=False, unit="step",
               disable=None if ranks.leads else True)  # None: no bar where stderr is not a terminal
    loader = prefetch(load, steps, depth=args.prefetch, threads=args.sample_threads)
    begin = waiting = time.perf_counter()
    for step, total, batch in loader:
        clock.add("wait", time.perf_counter() - waiting)
        torch.manual_seed(mix(mix(args.seed ^ ranks.rank) ^ (epoch * per_epoch + step)))  # dropout, keyed as sampling is
        batch.wait()
        t0 = clock.now()
        logits = model(batch.blocks, batch.x)
        loss = F.cross_entropy(logits, batch.y, reduction="sum")
        t1 = clock.now()
        optimizer.zero_grad(set_to_none=True)
        (loss * (ranks.world / total)).backward()  # ranks average gradients: each seed weighs 1 / total, whatever its rank
        t2 = clock.now()
        optimizer.step()
        t3 = clock.now()
        for stage, start, end in (("forward", t0, t1), ("backward", t1, t2), ("optimizer", t2, t3)):
            clock.lap(stage, start, end)
        loss_sum += loss.detach()
        count += batch.y.numel()
        bar.update()
        if stop.agreed():
            break
        waiting = time.perf_counter()
    loader.close()
    bar.close()
    stages = clock.totals()
    seconds = time.perf_counter() - begin
    loss_sum, count = ranks.sum(loss_sum.item(), count)
    figures = {"loss": loss_sum / max(count, 1), "seconds": seconds, "seeds_per_s": count / seconds, **stages}
    return step + 1, stop.answer, figures


@torch.no_grad()
def sampled_accuracy(ranks, args, sampler, ring, model, nodes):
    """Accuracy on nodes through sampled neighbourhoods: an estimate that costs a batch or two; None without nodes."""
    if not nodes.numel():
        return None
    model.eval()
    mine = nodes[ranks.part(nodes.numel())].split(args.batch_size)
    load = lambda item, slot: ring.fetch(slot, sampler.sample(item[1], -1 - item[0]))  # noqa: E731  steps below 0
    right = 0
    for batch in prefetch(load, enumerate(mine), depth=args.prefetch, threads=args.sample_threads):
        batch.wait()
        right += (model(batch.blocks, batch.x).argmax(1) == batch.y).sum()
    return ranks.sum(int(right))[0] / nodes.numel()


def exact_accuracy(store, model):
    """Accuracy on every split from exact layer-wise inference -> {split: accuracy or None where it is empty}."""
    features = store.features.tensor if hasattr(store.features, "tensor") else store.features.gather(torch.arange(store.num_nodes))
    predicted = inference(model, store.indptr, store.indices, features).argmax(1).cpu()
    right = predicted == store.labels
    return {name: right[nodes].double().mean().item() if nodes.numel() else None for name, nodes in store.split.items()}


def peak_memory(ranks):
    """Peak bytes of this process: of GPU memory on CUDA, resident memory on CPU."""
    if ranks.gpus:
        return torch.cuda.max_memory_allocated()
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def save_checkpoint(path, args, ranks, model, optimizer, epoch, step):
    """Write the state of the run atomically: the old file or the new one is there, never half of one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}
    try:
        torch.save({**state, "run": identity(args, ranks)}, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise StoreError(f"checkpoint {path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def identity(args, ranks):
    """What a checkpoint must agree on with the run that resumes it."""
    names = ("dataset", "seed", "fanout", "hidden", "num_layers")
    return {**{name: getattr(args, name) for name in names}, "total_batch": args.batch_size * ranks.world}


def load_checkpoint(args, ranks, model, optimizer):
    """Load --resume into model and optimizer -> (epoch, steps done in it)."""
    try:
        state = torch.load(args.resume, map_location=ranks.device, weights_only=True)
        saved, epoch, step = state["run"], state["epoch"], state["step"]
    except Exception as error:  # torch.load raises a dozen types on a damaged file
        raise StoreError(f"--resume {args.resume} is not a checkpoint of train.py: {str(error).splitlines()[0]}") from error
    for name, value in identity(args, ranks).items():
        if saved.get(name) != value:
            raise StoreError(f"--resume {args.resume} was made with {name} {saved.get(name)}, this run has {value}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return epoch, step


def report(ranks, args, figures, line):
    """Print a line and append the figures to --log, on rank 0."""
    if ranks.leads:
        tqdm.write(line)
        if args.log:
            with open(args.log, "a") as file:
                file.write(json.dumps(figures) + "\n")


def percent(accuracy):
    """0.8123 -> '81.23%'; None -> 'n/a'."""
    return "n/a" if accuracy is None else f"{100 * accuracy:.2f}%"


def epoch_line(args, figures):
    """The dense line of one epoch. Sampling and fetching run on threads beside the rest; `wait` is what they cost."""
    stages = "  ".join(f"{stage} {figures[stage]:.2f}" for stage in STAGES)
    return (
        f"epoch {figures['epoch']:>3}/{args.epochs}  loss {figures['loss']:.4f}  "
        f"valid {percent(figures['valid_sampled'])} (sampled)  {figures['seconds']:.2f} s  "
        f"{figures['seeds_per_s']:,.0f} seeds/s  [{stages} s]  peak {figures['peak_bytes'] / 2**30:.2f} GiB"
    )


def describe(ranks, args, store, model):
    """Print every derived quantity before the work starts."""
    split = " / ".join(f"{name} {nodes.numel():,}" for name, nodes in store.split.items())
    total = args.batch_size * ranks.world
    steps = -(-store.split["train"].numel() // total)
    where = f"{ranks.world} x {torch.cuda.get_device_name() if ranks.gpus else 'CPU'}"
    for line in (
        f"graph   {store.path}: {store.num_nodes:,} nodes, {store.num_edges:,} edges, "
        f"{store.feature_dim} features, {store.num_classes} classes; {split}",
        f"model   SAGE, {args.num_layers} layers, hidden {args.hidden}, {sum(p.numel() for p in model.parameters()):,} "
        f"parameters; fanout {','.join(map(str, args.fanout))} from the seeds outward",
        f"run     {where}, mode {args.mode}, {torch.get_num_threads()} threads each; batch {args.batch_size} x "
        f"{ranks.world} = {total} seeds, {steps} steps an epoch",
    ):
        print(line, flush=True)


def worker(ranks, args, path):
    """One rank's whole run: open the store, train, evaluate -> exit code."""
    if path is None:  # under torchrun one rank of each machine prepares the data, the others wait for it
        if ranks.local_rank == 0:
            path = prepare(args)
        ranks.barrier()
        path = path or prepare(args)
    store = GraphStore.open(path)
    on_gpu = "cuda" in args.mode.split("-")[0]
    place = lambda tensor: tensor.to(ranks.device) if on_gpu else tensor  # noqa: E731
    features = place(store.features.tensor) if hasattr(store.features, "tensor") else store.features
    sampler = NeighborSampler(place(store.indptr), place(store.indices), args.fanout, seed=args.seed, check=False)
    ring = FeatureRing(features, place(store.labels), slots=args.prefetch + 1, device=ranks.device)
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = SAGE(store.feature_dim, args.hidden, store.num_classes, num_layers=args.num_layers, dropout=args.dropout)
    model.to(ranks.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    epoch, first = load_checkpoint(args, ranks, model, optimizer) if args.resume else (0, 0)
    parallel = ranks.wrap(model)
    if ranks.leads:
        describe(ranks, args, store, model)

    with ddp.StopSignal(ranks) as stop:
        for epoch in range(epoch, args.epochs):
            step, stopped, figures = train_epoch(
                ranks, args, store, sampler, ring, parallel, optimizer, stop, epoch, first
            )
            if not stopped:
                valid = sampled_accuracy(ranks, args, sampler, ring, model, store.split["valid"])
                figures = {"epoch": epoch + 1, **figures, "valid_sampled": valid, "peak_bytes": peak_memory(ranks)}
                report(ranks, args, figures, epoch_line(args, figures))
            if args.checkpoint and ranks.leads:
                done = (epoch, step) if stopped else (epoch + 1, 0)
                save_checkpoint(args.checkpoint, args, ranks, model, optimizer, *done)
            if stopped:
                kept = f"resume with --resume {args.checkpoint}" if args.checkpoint else "nothing kept: no --checkpoint"
                report(ranks, args, {"stopped": [epoch + 1, step]}, f"stopped in epoch {epoch + 1} after step {step}; {kept}")
                ranks.barrier()
                return stop.exit_code
            first = 0
    if ranks.leads:
        exact = exact_accuracy(store, model)
        line = "  ".join(f"{name} {percent(accuracy)}" for name, accuracy in exact.items())
        report(ranks, args, {"exact": exact}, f"exact layer-wise accuracy  {line}")
    ranks.barrier()
    return 0


def fanout(text):
    """Parse '15,10,5'."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(k == 0 or k < -1 for k in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: write positive numbers, or -1 for all neighbours, as in 15,10,5")
    return numbers


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


def parse_args(argv):
    """Parse the command line; argparse exits with code 2 and one line on bad input."""
    parser = argparse.ArgumentParser(
        description="Train GraphSAGE by neighbour sampling.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    count, number = positive(int), positive(float)
    # data
    parser.add_argument("--dataset", default="synthetic", help="name or path: synthetic, synthetic:nodes=..., a store folder, an .npz file, cora, citeseer, pubmed, ogbn-arxiv, ogbn-products, ogbn-papers100M")
    parser.add_argument("--root", default="data", help="folder for downloads and built stores")
    parser.add_argument("--backend", default="mmap", choices=["mmap", "lmdb"], help="how a newly built store keeps features")
    # sampling
    parser.add_argument("--fanout", type=fanout, default=None, metavar="15,10,5", help="neighbours taken by each seed, then by "
                        "each of those, ...; -1 takes all; PyG's order, DGL lists the same as 5,10,15 (default: 10 a layer)")  # fmt: skip
    parser.add_argument("--batch-size", type=count, default=1024, help="seeds a step of each process")
    # model and optimiser
    parser.add_argument("--hidden", type=count, default=128, help="width of the inner layers")
    parser.add_argument("--num-layers", type=count, default=None, help="layers (default: one for each fanout, else 3)")
    parser.add_argument("--dropout", type=positive(float, zero=True), default=0.5, help="probability after each inner layer")
    parser.add_argument("--lr", type=number, default=0.003, help="Adam's learning rate")
    parser.add_argument("--weight-decay", type=positive(float, zero=True), default=0.0, help="Adam's L2 term")
    parser.add_argument("--epochs", type=count, default=10, help="passes over the training nodes")
    parser.add_argument("--seed", type=int, default=0, help="fixes weights, order, sampling and dropout")
    # processes and placement
    parser.add_argument("--gpus", type=positive(int, zero=True), default=None, help="GPUs, one process each; 0 trains on CPU "
                        "(default: 1 when there is one)")  # fmt: skip
    parser.add_argument("--procs", type=count, default=1, help="processes with --gpus 0; the cores are shared among them")
    parser.add_argument("--mode", default="auto", choices=["auto", *MODES], help="where graph and features live - where "
                        "training runs")  # fmt: skip
    parser.add_argument("--prefetch", type=positive(int, zero=True), default=2, help="batches prepared ahead; 0: none")
    parser.add_argument("--sample-threads", type=count, default=1, help="threads that sample and fetch")
    # files
    parser.add_argument("--checkpoint", metavar="FILE", help="write the run's state here after each epoch and on Ctrl-C")
    parser.add_argument("--resume", metavar="FILE", help="go on from a checkpoint")
    parser.add_argument("--log", "--log-file", metavar="FILE", help="append one JSON line an epoch (torchrun takes --log for "
                        "an option of its own: write --log-file there)")  # fmt: skip
    args = parser.parse_args([dashes(word) for word in argv])
    check_args(parser, args)
    return args


MODES = ("cpu-cpu", "cpu-cuda", "cuda-cuda")


def dashes(word):
    """--batch_size=8 -> --batch-size=8."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def check_args(parser, args):
    """Fill in what depends on other flags and on the machine; refuse what cannot work, before anything is loaded."""
    if args.fanout is None:
        args.fanout = [10] * (args.num_layers or 3)
    args.num_layers = args.num_layers or len(args.fanout)
    if len(args.fanout) != args.num_layers:
        parser.error(f"--fanout {','.join(map(str, args.fanout))} has {len(args.fanout)} hops, --num-layers is "
                     f"{args.num_layers}; give one fanout for each layer")  # fmt: skip
    if args.dropout >= 1:
        parser.error(f"--dropout {args.dropout} must be below 1")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.gpus is None:
        args.gpus = min(there, 1) if args.procs == 1 and args.mode != "cpu-cpu" else 0
    if args.gpus > there:
        parser.error(f"--gpus {args.gpus}: this machine has {there} usable; give {f'at most {there}' if there else '--gpus 0'}")
    if args.gpus and args.procs > 1:
        parser.error(f"--procs {args.procs} is for --gpus 0; with GPUs there is one process for each")
    if args.mode == "auto":
        args.mode = "cpu-cuda" if args.gpus else "cpu-cpu"
    if args.mode.endswith("cuda") and not args.gpus:
        parser.error(f"--mode {args.mode} needs a CUDA GPU and --gpus 1 or more; --mode cpu-cpu works here")
    if args.mode == "cpu-cpu" and args.gpus:
        parser.error(f"--mode cpu-cpu trains on CPU: give --gpus 0 instead of --gpus {args.gpus}")
    for flag in ("checkpoint", "log"):
        folder = Path(getattr(args, flag) or ".").absolute().parent
        if not folder.is_dir():
            parser.error(f"--{flag} {getattr(args, flag)}: the folder {folder} does not exist")
    if args.resume and not Path(args.resume).is_file():
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
