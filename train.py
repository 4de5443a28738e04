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
    python train.py --dry-run --gpus 4 --free-gpu 80GB               # memory of each mode and the plan, no training
    torchrun --nproc-per-node 4 train.py --gpus 4 --dataset ogbn-products
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py --gpus 4

One step is sample -> fetch -> forward -> backward -> optimizer: `Training.epoch` is the loop, and loader.py runs the
first two ahead of it in threads. On a GPU that can read the features, `StepGraphs` of extras/step_graphs.py takes the place of
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

import math
import os
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import ddp
from disk.files import PLANNED, StoreError, progress_bar, unread
from extras import STARTS, STEPS, MissingExtra, extra, present
from run import command_line
from run.adam import Adam, rate_at
from run.allocator import announce, release_memory, trim_memory
from run.checkpoint import (
    check_graph,
    check_kind,
    claimed,
    common_state,
    described_run,
    restore,
    save_checkpoint,
)
from run.finite import LossSum, all_finite
from run.flags import files_of_seed, seed_path
from run.report import (
    Clock,
    Report,
    advice,
    best_line,
    describe,
    epoch_line,
    exchange,
    peak_memory,
    stages_line,
)
from run.run import Run, dry_run, open_run, prepare, prepared
from sampler import DamagedGraph
from tasks.metrics import NotFinite

# flags that are not given come from the checkpoint to resume, if any
parse_args = partial(
    command_line.parse_args, complete=lambda flags: common_state(ddp.Ranks(), flags)[2]
)
# run backward on the calling thread: the hand-over to autograd's own thread takes 50 us
torch.autograd.set_multithreading_enabled(False)
HINTS = {
    DamagedGraph: "; python store.py verify names the file",
    MemoryError: "; try a smaller --batch-size or --hidden, for nodes and links also --fanout or --mode cpu-cuda",
    MissingExtra: "",
    NotFinite: "; try a smaller --lr or scale the features; --checkpoint keeps the last finite state",
}


class Eager:
    """Eager training steps, in the shapes of each batch; `StepGraphs` of extras/step_graphs.py has the same methods.
    parallel: the model, wrapped in DistributedDataParallel if there are several ranks. load_batch: as for `NodeLoader`."""

    def __init__(self, run, parallel, optimizer):
        self.run = run
        self.parallel = parallel
        self.optimizer = optimizer
        self.load_batch = run.task.load_batch

    def begin(self):
        """Reset the loss before an epoch -> LossSum."""
        self.losses = LossSum(torch.zeros((), dtype=torch.float64, device=self.run.ranks.device))
        return self.losses

    def step(self, batch, clock):
        """Forward, loss, backward; after the last of a step's --accumulate passes, the optimizer."""
        run = self.run
        world = run.ranks.world
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


@dataclass(kw_only=True)
class Training:
    """The epochs of a run. stepper: `Eager` or `StepGraphs`. best: the best epoch so far, as checkpoints keep it.
    written: whether a checkpoint was."""

    run: Run
    stepper: object
    optimizer: Adam
    best: dict
    report: Report
    stop: ddp.StopSignal
    written: bool = False

    def train(self, start, first):
        """Train from step `first` of epoch `start`, validating and saving after each epoch -> exit code: that of the
        signal if training was stopped, else 0."""
        ranks = self.run.ranks
        plan = self.run.plan
        level = 0  # of resident memory
        resumed = plan.trains and plan.resume not in (None, "auto")
        if resumed and not os.path.exists(plan.checkpoint or ""):
            self.save(start, first)  # there may be nothing left to train
        for epoch in range(start, plan.epochs if plan.trains else start):
            if plan.early_stop and epoch - self.best["epoch"] >= plan.early_stop:
                ranks.say(
                    f"early   stopped after epoch {epoch}: no better score since epoch {self.best['epoch']}"
                )
                break
            profiled = epoch == min(start + 1, plan.epochs - 1)
            with self.report.traced() if profiled else nullcontext():
                done, figures, laps = self.epoch(epoch, first)
            first = 0
            if profiled:
                self.report.draw("timeline", laps)
            self.check(figures["loss"] or 0.0, epoch, done)
            if self.stop.answer:
                self.save(epoch, done)
                self.report.stopped(epoch + 1, done)
                ranks.barrier()
                return self.stop.exit_code
            figures = self.validate({"epoch": epoch + 1, **figures})
            ranks.say(advice(ranks, figures) if epoch == start else "")
            self.save(epoch + 1, 0)
            if plan.allocator == "tuned" and not ranks.gpus:
                level = trim_memory(level)
        if self.written:
            file = plan.checkpoint
            ranks.say(f"wrote {file}; --resume {file} --predict FILE.npy uses it")
        return 0

    def epoch(self, epoch, first):
        """Run one epoch from step `first` -> (the next step, figures, laps of the `Clock`)."""
        run = self.run
        plan = run.plan
        run.model.train()
        clock = Clock(run.ranks.gpus)
        losses = self.stepper.begin()
        count = 0
        done = first
        rate = rate_at(plan, epoch, epoch * plan.steps + first)  # if the epoch is over
        # the loader's threads run ahead: blocks = sampler.sample(seeds, global_step), then ring.fetch(slot, blocks)
        loader = run.loader(
            run.store.split["train"], timed=clock.timed, load_batch=self.stepper.load_batch
        )
        loader.epoch, loader.step = epoch, first
        bar = progress_bar(
            run.ranks.leads,
            desc=f"epoch {epoch + 1}",
            total=loader.steps,
            initial=first,
            unit="step",
            leave=False,
        )
        waiting = time.perf_counter()
        for batch in loader:
            clock.add("stall", waiting, time.perf_counter())
            if batch.began is not None:
                clock.events.append(("transfer", batch.began, batch.ready))
            rate = rate_at(plan, epoch, batch.global_step)
            self.optimizer.set_rate(rate)
            self.stepper.step(batch, clock)
            count += len(batch.y)
            if batch.last:
                done = batch.step + 1
                finite = losses.finite(done)
                bar.update()
                if plan.checkpoint_every and (batch.global_step + 1) % plan.checkpoint_every == 0:
                    finite = self.save(epoch, done, losses.total.item())
                if not finite:
                    self.stop.request()
                if self.stop.agreed():
                    break
            waiting = time.perf_counter()
        bar.close()
        stages = clock.totals()
        seconds = time.perf_counter() - clock.zero
        loss, count = run.ranks.sum(losses.total.item(), count)
        figures = {
            "first_step": first,
            "loss": loss / count if count else None,
            "lr": rate,
            "seconds": seconds,
            "seeds_per_s": count / seconds,
            **stages,
        }
        if run.ranks.world > 1 and self.stepper.parallel:
            figures["exchange"] = exchange(self.stepper.parallel) * (done - first)
        return done, figures, clock.laps

    def check(self, loss, epoch, step):
        """Raise StoreError for parameters that are not trained, NotFinite if loss or weights are not finite after a step."""
        run = self.run
        plan = run.plan
        if {*run.model.parameters()} - {*self.optimizer.param_groups[0]["params"]}:
            raise StoreError(
                f"--model {plan.model} "
                "makes parameters in forward, which are not trained: make them in __init__"
            )
        if self.finite(loss):
            return
        problem = f"the loss is {loss}"
        if math.isfinite(loss):
            problem = "a weight or batch-norm statistic is not finite"
        raise NotFinite(f"{problem} in epoch {epoch + 1}, step {step} of {plan.steps}")

    def validate(self, figures):
        """Validate, report an epoch and keep its weights if they are the best -> its figures and the new ones."""
        run = self.run
        if run.ranks.world > 1:
            for buffer in run.model.buffers():  # batch-norm statistics
                torch.distributed.broadcast(buffer, 0)
        valid, watched = run.task.validate(run)
        figures = {**figures, **valid, "peak_bytes": peak_memory(run.ranks)}
        self.report.tell(epoch_line(run.plan, figures, run.task.examples), figures)
        run.ranks.say(run.plan.verbose and stages_line(figures))
        if run.plan.weights == "best" and watched > self.best["score"]:
            weights = {name: value.clone() for name, value in run.model.state_dict().items()}
            self.best.update(score=watched, epoch=figures["epoch"], model=weights)
        return figures

    def save(self, epoch, step, loss=None):
        """Write the checkpoint, with a loss only if it, weights and moments are finite on all ranks -> whether they
        are."""
        finite = loss is None or self.finite(loss)
        if finite and self.run.plan.checkpoint and self.run.ranks.leads:
            save_checkpoint(self.run, self.optimizer, self.best, epoch, step)
            self.written = True
        return finite

    def finite(self, loss):
        return all_finite(self.run.ranks, loss, self.run.model, self.optimizer)


def train(ranks, flags, path):
    """Open, train, evaluate -> (exit code, {name: exact score} or, if a signal stopped it, None, title of the scores). path: of
    the store; None: find or build it here."""
    if flags.runs > 1:
        ranks.say(f"seed    {flags.seed}, run {flags.turn + 1} of {flags.runs}")
    announce(ranks, flags)
    # torchrun may start fewer processes than --gpus says
    flags = replace(flags, gpus=min(flags.gpus, ranks.local_world))
    state, file, flags = common_state(ranks, flags)
    path = path or prepared(ranks, flags)
    if state:
        check_kind(flags, file, path)
    run = open_run(ranks, flags, path, partial(check_graph, ranks, state, file))
    plan = run.plan
    model = run.model
    optimizer = Adam(
        model.parameters(),
        lr=plan.lr,
        weight_decay=plan.weight_decay,
        fused=True,
        clip_norm=plan.clip_norm,
    )
    best = {"score": -math.inf, "epoch": 0, "model": None}  # for --weights best
    start, first = restore(run, state, file, optimizer, best) if state else (0, 0)
    started = [module.start(run) for module in present(STARTS).values() if not state]
    del state
    if plan.weights == "last":  # resuming with --weights best later starts without an old best
        best.update(score=-math.inf, model=None)
    static = plan.trains and start < plan.epochs
    graphs, message = None, ""
    for step in present(STEPS).values() if static else ():
        graphs, message = step.build(run, optimizer)
    stepper = graphs or Eager(run, ranks.wrap(model, unused=bool(run.digest)), optimizer)
    describe(run, file, start, first)
    ranks.say("\n".join(started))
    ranks.say(message and f"graph   {'' if graphs else 'no CUDA graphs: '}{message}")
    report = Report(ranks, plan)
    with ddp.StopSignal(ranks) as stop:
        training = Training(
            run=run, stepper=stepper, optimizer=optimizer, best=best, report=report, stop=stop
        )
        try:
            code = training.train(start, first)
        finally:  # also of a run that diverged
            report.draw("curve", run.task, best)
    if code:
        return code, None, ""
    ranks.check_equal(model)
    if best["model"]:
        model.load_state_dict(best["model"])
        ranks.say(best_line(plan, start, best["epoch"], run.task.score_text(best["score"])))
    try:
        if plan.export and ranks.leads:
            extra(".export").export(plan.export, model, described_run(run))
    finally:  # scores, where a file cannot be written
        try:
            exact = run.task.evaluate(run, report)
        finally:
            report.print_result()
    ranks.barrier()
    code = 2 if report.failed & {"profile", "timeline", "curve"} else 0
    return code, exact, run.task.title


def train_many(ranks, flags, path):
    """Train --runs times with consecutive seeds -> exit code. Each has its own split if the data set has none or
    several."""
    columns = {}  # name of a score -> its values; some runs may lack one
    code = 0
    for turn in range(flags.runs):
        seed = flags.seed + turn
        turn_flags = {"seed": seed, "turn": turn, "run": f"{flags.run}-seed{seed}"}
        turn_flags |= files_of_seed(flags, seed)
        if flags.tensorboard:
            turn_flags["tensorboard"] = str(Path(flags.tensorboard, f"seed{seed}"))
        try:
            ended, scores, title = train(ranks, replace(flags, **turn_flags), path)
        except NotFinite as error:
            raise NotFinite(f"seed {seed}: {error}") from error
        if scores is None:
            return ended
        code = code or ended
        for name, score in scores.items():
            if score is not None:
                columns.setdefault(name, []).append(score)
        path = None  # the next seed's split may make it another store
        release_memory()
    Report(ranks, replace(flags, tensorboard=None)).runs(title, columns)
    return code


class Planned(ddp.Ranks):
    """One process that stands for all ranks of a run."""

    def gather(self, value):
        return [value] * self.world


def worker(ranks, flags, path):
    """Run one rank -> exit code; bad input ends in a one-line message instead of a traceback."""
    files = [flags.checkpoint] if ranks.leads and flags.checkpoint else []
    if flags.runs > 1:
        seeds = range(flags.seed, flags.seed + flags.runs)
        files = [seed_path(file, seed) for file in files for seed in seeds]
    try:
        with ExitStack() as claims:
            for file in files:
                claims.enter_context(claimed(file))
            if flags.runs > 1:
                return train_many(ranks, flags, path)
            return train(ranks, flags, path)[0]
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
        flags = parse_args(sys.argv[1:] if argv is None else argv)
        if argv is None and not flags.gpus:  # or torch's optimizers would make a CUDA context
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        path = None if ddp.under_torchrun() else prepare(flags)
        os.environ[PLANNED] = "" if flags.free_host is None else str(flags.free_host)
        world = max(flags.gpus, flags.procs)
        if flags.dry_run:
            ddp.share_cores(world)
            dry_run(Planned(world=world, local_world=world, gpus=flags.gpus), flags, path)
        else:
            ddp.launch(worker, world, flags, path, gpus=flags.gpus)
    except (StoreError, MissingExtra) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return unread(error)
    finally:
        os.environ.pop(PLANNED, None)
    return 0


if __name__ == "__main__":
    terminal.ready()
    sys.exit(main())
