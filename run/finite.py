"""Detect losses, weights and features that are not finite, or so large that they soon will not be."""

import math
import os
from contextlib import contextmanager

import torch

from disk.files import StoreError
from tasks.metrics import NotFinite

LOOK = 16  # optimizer steps between looks at the loss on a GPU
UNUSUAL = 1e4  # features above it are pointed out


class LossSum:
    """The losses of an epoch added up on the training device, and whether they are finite, without waiting for a GPU;
    total: float64 scalar: a sum with NaN or infinity in it stays so."""

    def __init__(self, total):
        self.total = total
        self.seen = torch.zeros((), dtype=torch.float64, pin_memory=total.is_cuda)

    def finite(self, step):
        """Whether all losses that are known were finite: on CPU up to this step, on a GPU a little behind it."""
        if not self.total.is_cuda or step % LOOK == 0:
            self.seen.copy_(self.total, non_blocking=True)
        return math.isfinite(self.seen.item())


@torch.no_grad()
def all_finite(ranks, loss, model, optimizer):
    """Whether a loss, all weights and all moments are finite, on every rank; the ranks call this together."""
    tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    # a NaN or an infinity stays in a sum; finite float32 values do not overflow float64
    total = float(sum(t.sum(dtype=torch.float64) for t in tensors))
    return not ranks.sum(not math.isfinite(total + loss))[0]


def not_finite(what, run):
    """A NotFinite that says what it was, what the numbers behind it are, and what to try; run: of run/evaluate.py."""
    args, feature = run.args, largest_feature(run.store) or 0.0
    weights = torch.cat([p.detach().flatten().double().cpu() for p in run.model.parameters()])
    known = weights[weights.isfinite()].abs()
    largest = f"the largest weight is {known.max():.3g}" if len(known) else "no weight is finite"
    said = f"{largest}, the largest feature {feature:.3g}" if feature else largest
    tried = "scale the features, or " * (feature > UNUSUAL) + f"try a smaller --lr than {args.lr:g}"
    if args.checkpoint and os.path.isfile(args.checkpoint):
        tried += f"; {args.checkpoint} holds the last finite state that was written"
    seed = f"seed {args.seed}: " if args.runs > 1 else ""
    return NotFinite(f"{seed}{what}: {said}; {tried}")


@contextmanager
def finite_scores(run, when):
    """A context for what scores the network: a NotFinite says what `not_finite` says."""
    try:
        yield
    except NotFinite as error:
        raise not_finite(f"{error} {when}", run) from error


def largest_feature(store):
    """The largest absolute value among the features as meta.json has it; None where it has none."""
    return max((r["largest"] for r in store.meta["files"].values() if "largest" in r), default=None)


def check_features(ranks, store, dtype):
    """Refuse features beyond the numbers of the training dtype, and point out unusually large ones in a line."""
    feature, end = largest_feature(store) or 0.0, torch.finfo(dtype).max
    largest = f"the largest feature is {feature:.3g}"
    if feature > end:
        limit = f"{str(dtype)[6:]}, to train in, ends at {end:.3g}"
        raise StoreError(f"{store.path}: {largest}, and {limit}: scale the features")
    if feature > UNUSUAL:
        advice = "scale each column, to a standard deviation of 1 say, if the loss does not fall"
        ranks.say(f"data    {largest}: {advice}")
