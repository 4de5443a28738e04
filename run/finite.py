"""Detect losses, weights and features that are not finite, or so large that they soon will not be."""

import math

import torch

from disk.convert import RoundedRows
from disk.files import StoreError

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
    """Return whether loss, weights, batch-norm statistics and moments are finite on every rank; a collective call."""
    tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    tensors += [t for name, t in model.named_buffers() if name.endswith(("_mean", "_var"))]
    # a NaN or an infinity stays in a sum; finite float32 values do not overflow float64
    total = float(sum(t.sum(dtype=torch.float64) for t in tensors))
    return not ranks.sum(not math.isfinite(total + loss))[0]


def check_features(ranks, task, dtype):
    """Raise StoreError for features beyond the range of the training dtype; print a line for unusually large ones, and for
    columns that rounding, of the store or to that dtype, leaves with few different values."""
    store = task.store
    records = store.meta["files"].values()
    end = torch.finfo(dtype).max
    # of rows that may change it is not known
    feature = max((record.get("largest", 0.0) for record in records), default=0.0)
    largest = f"the largest feature is {feature:.3g}"
    if feature > end:
        raise StoreError(
            f"{store.path}: {largest}, and {str(dtype)[6:]}, used for training, ends at {end:.3g}"
            ": scale the features"
        )
    if feature > UNUSUAL:
        ranks.say(f"data    {largest}: scale each column if the loss does not fall")
    if rounded := store.meta.get("rounded"):
        ranks.say(f"data    {rounded}")
    # a part of a store has no rows of the others
    if not task.placed or store.part or store.features.dtype in (dtype, torch.uint8):
        return
    sample = RoundedRows(*store.features.shape, store.meta.get("node_types", []))
    rows = store.features.gather(sample.ids)
    sample.add(0, rows, rows.to(dtype))
    if loss := sample.loss(store.feature_names):
        ranks.say(f"data    features are trained on as {str(dtype)[6:]}: {loss}")
