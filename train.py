"""Train a graph neural network by neighbour sampling.

    python train.py                                                  # built-in synthetic graph, no download
    python train.py --dataset ogbn-products --fanout 15,10,5         # one GPU if there is one, else the CPU
    python train.py --gpus 4 --dataset ogbn-products                 # four GPUs of this machine
    python train.py --gpus 0 --procs 2 --dataset my_graph.npz        # two CPU processes
    python train.py --task link --dataset cora --model gcn           # link prediction
    python train.py --task graph --dataset molecules.npz             # targets of many small graphs
    python train.py --dataset cora --model gat --heads 8 --runs 10   # mean and standard deviation over ten seeds
    python train.py --resume run.pt --predict classes.npy            # classes of all nodes from a checkpoint
    python train.py --resume run.pt --predict theirs.npy --dataset other.npz    # another graph, same features
    torchrun --nproc-per-node 4 train.py --gpus 4 --dataset ogbn-products
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py --gpus 4

One step is sample -> fetch -> forward -> backward -> optimizer: `train_epoch` is the loop, and loader.py runs the first
two ahead of it in threads. On a GPU that can read the features, `StepGraphs` of run/cuda_graphs.py takes the place of
`Eager`. docs/design.md follows one seed node through the files.
"""

import sys

from disk import terminal
from run import allocator

if __name__ == "__main__":
    terminal.begin()
    # before argparse, which comes after torch
    if not {"system", "--allocator=system"} & set(sys.argv):
        allocator.before_torch()

import gc
import math
import os
import statistics
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import torch

import ddp
from disk.files import SPLITS, StoreError, progress_bar, unread
from run import cuda_graphs, flags
from run.adam import Adam
from run.allocator import announce, trim_memory
from run.checkpoint import check_graph, claimed, common_state, restore, save_checkpoint
from run.finite import LossSum, all_finite
from run.own_model import is_own
from run.report import (
    Clock,
    Report,
    advice,
    best_line,
    describe,
    draw_timeline,
    epoch_line,
    kept_line,
    peak_memory,
    stages_line,
)
from run.run import open_run
from sampler import DamagedGraph
from sources import prepare as datasets
from tasks.metrics import NotFinite

# flags that are not given come from the checkpoint to resume, if any
parse_args = partial(flags.parse_args, complete=lambda args: common_state(ddp.Ranks(), args)[2])
# run backward on the calling thread: the hand-over to autograd's own thread takes 50 us
torch.autograd.set_multithreading_enabled(False)
HINTS = {
    DamagedGraph: "; python store.py verify names the file",
    MemoryError: "; try a smaller --batch-size or --hidden, for nodes and links also --fanout or --mode cpu-cuda",
    NotFinite: "; try a smaller --lr or scale the features; --checkpoint keeps the last finite state",
}


class Eager:
    """Eager training steps, in the shapes of each batch; `StepGraphs` of run/cuda_graphs.py has the same methods.
    parallel: the model, wrapped in DistributedDataParallel if there are several ranks. load_batch: as for `NodeLoader`."""

    def __init__(self, run, parallel, optimizer):
        self.run, self.parallel, self.optimizer = run, parallel, optimizer
        self.load_batch = run.task.load_batch

    def begin(self):
        """Reset the loss before an epoch -> LossSum."""
        self.losses = LossSum(torch.zeros((), dtype=torch.float64, device=self.run.ranks.device))
        return self.losses

    def step(self, batch, clock):
        """Forward, loss, backward; after the last of a step's --accumulate passes, the optimizer."""
        run, world = self.run, self.run.ranks.world
        # around the forward pass too, where DDP decides whether to exchange gradients
        with nullcontext() if batch.last or world == 1 else self.parallel.no_sync():
            with clock.timed("forward", on_gpu=True):
                loss = run.loss(batch, batch.global_step, self.parallel)
            with clock.timed("backward", on_gpu=True):
                # the loss is a sum, and DDP averages over ranks: each of the step's `total` seeds weighs 1 / total
                (loss * (world / batch.total)).backward()
        self.losses.total += loss.detach()
        if batch.last:
            with clock.timed("optimizer", on_gpu=True):
                run.ranks.average_sparse(run.model)
                # keep the weights that produced a non-finite loss (on a GPU it may be noticed some steps later)
                if self.losses.finite(batch.step + 1):
                    self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)


def train_epoch(run, stepper, stop, save, epoch, first):
    """Run one epoch from step `first` -> (next step, stopped early, figures, laps of the `Clock`)."""
    ranks, args, count, done = run.ranks, run.args, 0, first
    run.model.train()
    clock, losses = Clock(ranks.gpus), stepper.begin()
    position = {"desc": f"epoch {epoch + 1}", "total": args.steps, "initial": first}
    bar = progress_bar(ranks.leads, unit="step", leave=False, **position)
    # the loader's threads run ahead: blocks = sampler.sample(seeds, global_step), then ring.fetch(slot, blocks)
    loader = run.loader(run.store.split["train"], timed=clock.timed, load_batch=stepper.load_batch)
    loader.epoch, loader.step = epoch, first
    waiting = time.perf_counter()
    for batch in loader:
        clock.add("stall", waiting, time.perf_counter())
        if batch.began is not None:
            clock.events.append(("transfer", batch.began, batch.ready))
        stepper.step(batch, clock)
        count += len(batch.y)
        if batch.last:
            done, finite = batch.step + 1, losses.finite(batch.step + 1)
            bar.update()
            if args.checkpoint_every and (batch.global_step + 1) % args.checkpoint_every == 0:
                finite = save(epoch, done, losses.total.item())
            if not finite:
                stop.request()
            if stop.agreed():
                break
        waiting = time.perf_counter()
    bar.close()
    stages, seconds = clock.totals(), time.perf_counter() - clock.zero
    loss, count = ranks.sum(losses.total.item(), count)
    figures = {"first_step": first, "loss": loss / count if count else None, "seconds": seconds}
    figures |= {"seeds_per_s": count / seconds, **stages}
    if ranks.world > 1 and stepper.parallel:
        figures["exchange"] = ranks.exchange(stepper.parallel) * (done - first)
    return done, stop.answer, figures, clock.laps


def train_epochs(run, stepper, optimizer, best, report, stop, start, first):
    """Train from step `first` of epoch `start`, validating and saving after each epoch -> exit code: that of the
    signal if training was stopped, else 0."""
    ranks, args, model, level = run.ranks, run.args, run.model, 0
    written = False

    def save(epoch, step, loss=None):
        """Write the checkpoint, with a loss only if loss, weights and moments are finite on all ranks -> whether they
        are."""
        nonlocal written
        finite = loss is None or all_finite(ranks, loss, model, optimizer)
        if finite and args.checkpoint and ranks.leads:
            save_checkpoint(args.checkpoint, args, run.store, model, optimizer, best, epoch, step)
            written = True
        return finite

    resumed = args.trains and args.resume not in (None, "auto")
    if resumed and not os.path.exists(args.checkpoint or ""):
        save(start, first)  # there may be nothing left to train
    for epoch in range(start, args.epochs if args.trains else start):
        if args.early_stop and epoch - best["epoch"] >= args.early_stop:
            since = f"no better score since epoch {best['epoch']}"
            ranks.say(f"early   stopped after epoch {epoch}: {since}")
            break
        rate = args.lr
        if args.lr_schedule == "cosine":
            rate *= (1 + math.cos(math.pi * epoch / args.epochs)) / 2  # 1 to 0 over all of --epochs
        for group in optimizer.param_groups:
            group["lr"] = rate
        profiled = epoch == min(start + 1, args.epochs - 1)
        with report.profile() if args.profile and profiled else nullcontext():
            step, stopped, figures, laps = train_epoch(run, stepper, stop, save, epoch, first)
        first = 0
        if {*model.parameters()} - {*optimizer.param_groups[0]["params"]}:
            made = "makes parameters in forward, which are not trained: make them in __init__"
            raise StoreError(f"--model {args.model} {made}")
        if args.timeline and profiled and ranks.leads:
            with report.attempt("timeline"):
                draw_timeline(laps, args.timeline)
        if not all_finite(ranks, loss := figures["loss"] or 0.0, model, optimizer):
            problem = f"the loss is {loss}"
            if math.isfinite(loss):
                problem = "a weight or batch-norm statistic is not finite"
            raise NotFinite(f"{problem} in epoch {epoch + 1}, step {step} of {args.steps}")
        if stopped:
            save(epoch, step)
            report.stopped(epoch + 1, step)
            ranks.barrier()
            return stop.exit_code
        for buffer in model.buffers() if ranks.world > 1 else ():  # batch-norm statistics
            torch.distributed.broadcast(buffer, 0)
        valid, watched = run.task.validate(run)
        figures = {"epoch": epoch + 1, **figures, "lr": rate, **valid}
        figures["peak_bytes"] = peak_memory(ranks)
        report.tell(epoch_line(args, figures, run.task.examples), figures)
        ranks.say(args.verbose and stages_line(figures))
        ranks.say(advice(ranks, figures) if epoch == start else "")
        if args.weights == "best" and watched > best["score"]:
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            best.update(score=watched, epoch=epoch + 1, model=weights)
        save(epoch + 1, 0)
        if args.allocator == "tuned" and not ranks.gpus:
            level = trim_memory(level)
    ranks.say(written and kept_line(args, run.task))
    return 0


def prepare(args):
    """Build the store of --dataset on first use -> its directory."""
    names = "seed", "backend", "symmetrize", "drop_duplicates", "feature_dtype"
    return datasets.prepare(args.dataset, args.root, **{k: getattr(args, k) for k in names})


def train(ranks, args, path):
    """Open, train, evaluate -> (exit code, {name: exact score}, title of the scores); the last two None if stopped.
    path: of the store; None: find or build it here."""
    if args.runs > 1:
        ranks.say(f"seed    {args.seed}, run {args.turn + 1} of {args.runs}")
    announce(ranks, args)
    state, file, args = common_state(ranks, args)
    if not path:  # local rank 0 builds the store while the other ranks of its machine wait
        with ranks.patience():
            path = prepare(args) if ranks.local_rank == 0 else None
    run = open_run(ranks, args, path or prepare(args), partial(check_graph, ranks, state, file))
    args, model = run.args, run.model
    optimizer = Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    best = {"score": -math.inf, "epoch": 0, "model": None}  # for --weights best
    start, first = restore(state, file, ranks, args, model, optimizer, best) if state else (0, 0)
    del state
    if args.weights == "last":  # resuming with --weights best later starts without an old best
        best.update(score=-math.inf, model=None)
    static = run.task.placed and args.trains and start < args.epochs
    graphs, message = cuda_graphs.build(run, optimizer) if static else (None, "")
    stepper = graphs or Eager(run, ranks.wrap(model, unused=is_own(args.model)), optimizer)
    describe(run, file, start, first)
    ranks.say(message and f"graph   {'' if graphs else 'no CUDA graphs: '}{message}")
    report = Report(ranks, args)
    with ddp.StopSignal(ranks) as stop:
        try:
            code = train_epochs(run, stepper, optimizer, best, report, stop, start, first)
        finally:  # also of a run that diverged
            report.curve(run.task, best)
    if code:
        return code, None, None
    ranks.check_equal(model)
    if best["model"]:
        model.load_state_dict(best["model"])
        ranks.say(best_line(args, best["epoch"], run.task.score_text(best["score"])))
    try:
        exact = run.task.evaluate(run, report)
    finally:  # scores that were computed, where --predict cannot be written
        report.print_result()
    ranks.barrier()
    return 2 if report.failed & {"profile", "timeline", "curve"} else 0, exact, run.task.title


def train_many(ranks, args, path):
    """Train --runs times with consecutive seeds -> exit code. Each has its own split if the data set has none or
    several."""
    columns = {}  # name of a score -> its values; some runs may lack one
    for turn in range(args.runs):
        seed = args.seed + turn
        one = flags.changed(args, seed=seed, turn=turn, run=f"{args.run}-seed{seed}")
        one.tensorboard = args.tensorboard and str(Path(args.tensorboard, f"seed{seed}"))
        one.checkpoint = args.checkpoint and flags.of_seed(args.checkpoint, seed)
        try:
            code, scores, title = train(ranks, one, path)
        except NotFinite as error:
            raise NotFinite(f"seed {seed}: {error}") from error
        if code:
            return code
        for name, score in scores.items():
            if score is not None:
                columns.setdefault(name, []).append(score)
        path = None  # the next seed's split may make it another store
        gc.collect()  # a GPU sampler and its frames hold each other, and with them the graph
        torch.cuda.empty_cache()  # or the next run counts as used what torch keeps
    mean = {name: statistics.mean(values) for name, values in columns.items()}
    std = {name: statistics.stdev(v) if len(v) > 1 else None for name, v in columns.items()}
    line = ""
    if columns:
        line = f"\nresult  {title} over {args.runs} seeds (mean +- standard deviation)"
    # as each run prints them; the names of scores of links and graphs begin with a part
    parts = SPLITS[::-1]
    for name in sorted(columns, key=lambda name: parts.index(name.partition(" ")[0])):
        values = columns[name]
        spread = "" if std[name] is None else f" +- {100 * std[name]:.2f}"
        of = f" of {len(values)}" if len(values) < args.runs else ""
        line += f"  {name} {100 * mean[name]:.2f}{spread}%{of}"
    report = Report(ranks, flags.changed(args, tensorboard=None))
    report.tell(line, {"runs": args.runs, "mean": mean, "std": std})
    return 0


def worker(ranks, args, path):
    """Run one rank -> exit code; bad input ends in a one-line message instead of a traceback."""
    files = [args.checkpoint] if ranks.leads and args.checkpoint else []
    if args.runs > 1:
        seeds = range(args.seed, args.seed + args.runs)
        files = [flags.of_seed(file, seed) for file in files for seed in seeds]
    try:
        with ExitStack() as claims:
            for file in files:
                claims.enter_context(claimed(file))
            return train(ranks, args, path)[0] if args.runs == 1 else train_many(ranks, args, path)
    except (StoreError, RuntimeError, *HINTS) as error:
        full = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
        full = full or "DefaultCPUAllocator" in str(error)  # torch has no type for it
        if isinstance(error, RuntimeError) and not full:
            raise
        kind = MemoryError if full else type(error)
        if not ranks.leads:
            # if all fail, rank 0 reports and the rest are killed within 2 s; a rank that fails alone reports itself
            time.sleep(3)
        print(f"train.py: {error}{HINTS.get(kind, '')}", file=sys.stderr)
        return 1 if kind in (NotFinite, MemoryError) else 2
    except OSError as error:
        return unread(error)


def main(argv=None):
    """Run the command line -> exit code; if a rank fails, `ddp.launch` exits with its code."""
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        if argv is None and not args.gpus:  # or torch's optimizers would make a CUDA context
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        path = None if ddp.under_torchrun() else prepare(args)
        ddp.launch(worker, max(args.gpus, args.procs), args, path, gpus=args.gpus)
    except StoreError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return unread(error)
    return 0


if __name__ == "__main__":
    terminal.ready()
    sys.exit(main())
