"""Detect losses, weights and features that are not finite, or so large that they soon will not be."""

import math
import os
from contextlib import contextmanager

import torch

from disk.files import StoreError
from tasks.metrics import NotFinite

LOOK = 16  # optimizer steps between checks of the loss on a GPU
UNUSUAL = 1e4  # larger features are reported


class LossSum:
    """Sum of an epoch's losses on the training device, checked for NaN and infinity without waiting
    for a GPU. total: float64 scalar tensor; once NaN or infinite it stays so."""

    def __init__(self, total):
        self.total = total
        self.seen = torch.zeros((), dtype=torch.float64, pin_memory=total.is_cuda)

    def finite(self, step):
        """Return whether the losses known so far are all finite; on a GPU this lags a few steps behind."""
        if not self.total.is_cuda or step % LOOK == 0:
            self.seen.copy_(self.total, non_blocking=True)
        return math.isfinite(self.seen.item())


@torch.no_grad()
def all_finite(ranks, loss, model, optimizer):
    """Return whether a loss, all weights and all optimizer moments are finite on every rank; a collective call."""
    tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    # a NaN or an infinity stays in a sum; finite float32 values do not overflow float64
    total = float(sum(t.sum(dtype=torch.float64) for t in tensors))
    return not ranks.sum(not math.isfinite(total + loss))[0]


def not_finite(what, run):
    """Build the NotFinite error for `what`: adds the largest weight and feature, and advice. run: a `Run`."""
    args, feature = run.args, largest_feature(run.store)
    weights = torch.cat([p.detach().flatten().double().cpu() for p in run.model.parameters()])
    finite = weights[weights.isfinite()].abs()
    state = f"the largest weight is {finite.max() if len(finite) else math.nan:.3g}"
    state += f", the largest feature {feature:.3g}" * (feature > 0)
    tried = "scale the features, or " * (feature > UNUSUAL) + f"try a smaller --lr than {args.lr:g}"
    if args.checkpoint and os.path.isfile(args.checkpoint):
        tried += f"; {args.checkpoint} holds the last finite state that was written"
    seed = f"seed {args.seed}: " if args.runs > 1 else ""
    return NotFinite(f"{seed}{what}: {state}; {tried}")


@contextmanager
def finite_scores(run, when):
    """Context for scoring the network: NotFinite is raised again with the details of `not_finite`."""
    try:
        yield
    except NotFinite as error:
        raise not_finite(f"{error} {when}", run) from error


def largest_feature(store):
    """Return the largest absolute feature that meta.json records; 0 if it records none, as for rows that may change."""
    return max((r.get("largest", 0.0) for r in store.meta["files"].values()), default=0.0)


def check_features(ranks, store, dtype):
    """Raise StoreError for features beyond the range of the training dtype; print a line for unusually large ones."""
    feature, end = largest_feature(store), torch.finfo(dtype).max
    largest = f"the largest feature is {feature:.3g}"
    if feature > end:
        limit = f"{str(dtype)[6:]}, used for training, ends at {end:.3g}"
        raise StoreError(f"{store.path}: {largest}, and {limit}: scale the features")
    if feature > UNUSUAL:
        ranks.say(f"data    {largest}: scale each column if the loss does not fall")
