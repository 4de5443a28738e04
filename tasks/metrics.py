"""Metrics: accuracy, F1, ROC-AUC, average precision, MRR, Hits@K, MAP@K, NDCG@K, Recall@K, RMSE, MAE, R2.

    score("f1", logits, y)                       # y: classes [n], or 0 and 1 for each of C labels [n, C]
    roc_auc(score, y), average_precision(score, y)
    ranking(ranks)                               # {"mrr": ..., "hits@1": ..., "hits@10": ...}
    at_k(10, ranks, lists)                       # {"MAP@10": ..., "NDCG@10": ..., "Recall@10": ...}

A metric is an entry of METRICS; the tasks and the choices of --metric are made from these. Every metric depends only on
the pairs of score and target, not on their order, and agrees with scikit-learn's of the same name, ties included. n
examples, C classes or labels.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from native import layers


class NotFinite(ValueError):
    """A loss, a weight or a score is NaN or infinite."""


def check_scores(scores, noun="scores"):
    """Raise NotFinite for scores that cannot be compared: NaN is neither above nor below any other."""
    if bad := scores.numel() - int(scores.isfinite().sum()):
        raise NotFinite(f"{bad:,} of {scores.numel():,} {noun} are not finite")


def score(metric, logits, y):
    """Compute a metric, from 0 to 1, of logits [n, C] for y: classes int64 [n], or multi-labels [n, C] of 0 and 1, with -1
    for one that is missing and left out. None without labels, and for the ROC-AUC of one class alone; NotFinite for a
    logit that is NaN or infinite. metric: name of one of METRICS with `from_logits`.
    """
    if not (y >= 0).any():
        return None
    check_scores(logits)
    return METRICS[metric].from_logits(logits, y)


def predictions(logits, y):
    """Predict from logits [n, C] what y holds: classes [n], or 0 and 1 [n, C]."""
    return logits.argmax(1) if y.dim() == 1 else logits > 0


def accuracy(logits, y):
    """Compute the share of right classes, or of right entries if multi-label."""
    return (predictions(logits, y) == y)[y >= 0].double().mean().item()


def f1(logits, y):
    """Compute F1 = 2 TP / (2 TP + FP + FN): macro over the classes that are predicted or in y; multi-label micro over all
    entries, and 0 if neither has a 1."""
    present = y >= 0
    pred = predictions(logits, y)
    if y.dim() == 2:
        pred &= present
        actual = y > 0
        hit = (pred & actual).sum()
        return (2 * hit.double() / (pred.sum() + actual.sum()).clamp(min=1)).item()
    pred = pred[present]
    y = y[present]
    size = int(max(pred.max(), y.max())) + 1
    columns = y[pred == y], pred, y
    hits, predicted, actual = (ids.bincount(minlength=size).double() for ids in columns)
    present = predicted + actual > 0
    return (2 * hits / (predicted + actual))[present].mean().item()


def balanced_accuracy(logits, y):
    """Average the recall over the classes in y; of several labels over 0 and 1, of all entries."""
    present = y >= 0
    hits = (predictions(logits, y) == y)[present].double()
    y = y[present].long()
    counts = y.bincount()
    return (y.bincount(hits) / counts)[counts > 0].mean().item()


def mean_roc_auc(logits, y):
    """Average the ROC-AUC over labels, or over classes one against the rest, without those that are the same wherever y
    has them; None if all are."""
    if y.dim() == 1:
        present = y >= 0
        logits = logits[present].double()
        y = F.one_hot(y[present], logits.shape[1])
        if y.shape[1] == 2:
            y = y[:, 1:]
            logits = logits.diff()  # probabilities of large logits would all be 1
        else:
            logits = logits.softmax(1)
    values = [roc_auc(score[of >= 0], of[of >= 0]) for score, of in zip(logits.T, y.T)]
    values = [value for value in values if not math.isnan(value)]
    return sum(values) / len(values) if values else None


def _counts(score, y):
    """Count the targets 1 and 0 at each distinct score, ascending -> two float64 tensors."""
    check_scores(score)
    values, rank = score.double().unique(return_inverse=True)
    ones = values.new_zeros(len(values)).index_add_(0, rank, y.double())
    return ones, rank.bincount(minlength=len(values)) - ones


def roc_auc(score, y):
    """Compute the chance that a target 1 in y [n] has a higher score [n] than a 0, ties half; nan without both."""
    ones, zeros = _counts(score, y)
    below = zeros.cumsum(0) - zeros / 2
    return ((ones * below).sum() / (ones.sum() * zeros.sum())).item()


def average_precision(score, y):
    """Compute the precision at each distinct score [n] weighted by the rise in recall of y [n]; nan without a 1."""
    ones, zeros = (counts.flip(0) for counts in _counts(score, y))
    hit = ones.cumsum(0)
    return ((ones * hit / (hit + zeros.cumsum(0))).sum() / ones.sum()).item()


def cross_entropy(logits, y, weight=None):
    """Compute the cross-entropy of logits [n, C] and classes [n], of which -1 does not count, summed over n; weight: [C] of
    each class."""
    loss = layers.cross_entropy(logits, y) if weight is None else None
    if loss is not None:
        return loss
    weight = weight if weight is None else weight.to(logits.dtype)
    return F.cross_entropy(logits, y, weight, reduction="sum", ignore_index=-1)


def binary_cross_entropy(logits, y):
    """Compute the cross-entropy of logits [n, C] and targets 0 and 1 [n, C], averaged over those of a row that are not -1
    (missing), summed over n."""
    targets = y.to(logits.dtype).clamp(min=0)
    values = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return mean_of_present(values, y >= 0).sum()


def mean_of_present(values, present):
    """Average the entries of each row of values [n, C] where the mask `present` [n, C] is true -> [n]; 0 without any.
    Shapes are static, as CUDA graphs need them."""
    share = present.shape[1] / present.sum(1).clamp(min=1).to(values.dtype)
    return values.where(present, 0).mean(1) * share


def hits_at(k, ranks):
    """Compute Hits@k: the share of ranks [n], counted from 1, up to k."""
    return (ranks <= k).double().mean().item()


def ranking(ranks):
    """Compute the metrics of ranks [n], counted from 1 -> {name: value}; values are None without ranks."""
    names = metrics_with("from_ranks")
    if not len(ranks):
        return dict.fromkeys(names)
    check_scores(ranks)
    return {name: METRICS[name].from_ranks(ranks) for name in names}


def at_k(k, ranks, lists):
    """Compute MAP@k, NDCG@k and Recall@k, averaged over lists -> {name: value}. ranks: [n], counted from 1, of
    what is relevant, each among what is not. lists: int64 [n], the number of the list that each is in."""
    order = np.lexsort((ranks, lists))
    _, row, sizes = lists[order].unique_consecutive(return_inverse=True, return_counts=True)
    number = torch.arange(len(row)) - (sizes.cumsum(0) - sizes)[row]
    place = ranks[order].double() + number  # also behind what is relevant
    most = sizes.clamp(max=k)
    gain = (torch.arange(int(most.max())) + 2).double().log2().reciprocal().cumsum(0)
    hit = (place <= k).double() / len(sizes)
    return {
        f"MAP@{k}": (hit * (number + 1) / place / most[row]).sum().item(),
        f"NDCG@{k}": (hit / (place + 1).log2() / gain[most - 1][row]).sum().item(),
        f"Recall@{k}": (hit / sizes[row]).sum().item(),
    }


def r2(output, y):
    """Average 1 - (squared errors / squared deviations from the mean) over targets [n, T], where y is not NaN."""
    squares = (output - y).square().nansum(0)
    spread = (y - y.nanmean(0)).square().nansum(0)
    # that of a constant target is what was rounded
    values = (1 - squares / spread)[spread > 1e-24 * y.square().nansum(0)]
    return values.mean().item() if len(values) else None


def errors(output, y, mean):
    """Compute RMSE, MAE and R2 of `output` [n, T], and the RMSE of predicting `mean` [T], where y is not NaN -> {name: value}. R2
    is averaged over targets, without those that are constant here; None if all are."""
    check_scores(output)
    y = y.double()  # squares of float32 may be infinite
    present = ~y.isnan()
    error = (output - y)[present]
    mean_error = (mean - y)[present]
    return {
        "rmse": error.square().mean().sqrt().item(),
        "mae": error.abs().mean().item(),
        "r2": r2(output.double(), y),
        "rmse_of_the_mean": mean_error.square().mean().sqrt().item(),
    }


class Metric(NamedTuple):
    """A metric, declared once. A task offers those that can be computed from what it has; from 0 to 1, larger is better."""

    name: str  # value of --metric, and key in --log
    title: str  # as papers spell it
    from_logits: Callable | None = None  # of logits [n, C] and y, as for `score`
    from_ranks: Callable | None = None  # of ranks [n], counted from 1
    from_scores: Callable | None = None  # of scores [n] and targets 0 and 1 [n]


# in the order of --help
METRICS = (
    Metric("accuracy", "accuracy", from_logits=accuracy),
    Metric("roc_auc", "ROC-AUC", from_logits=mean_roc_auc, from_scores=roc_auc),
    Metric("f1", "F1", from_logits=f1),
    Metric("balanced_accuracy", "balanced accuracy", from_logits=balanced_accuracy),
    Metric("mrr", "MRR", from_ranks=lambda ranks: ranks.double().reciprocal().mean().item()),
    Metric("hits@1", "Hits@1", from_ranks=partial(hits_at, 1)),
    Metric("hits@10", "Hits@10", from_ranks=partial(hits_at, 10)),
    Metric("ap", "AP", from_scores=average_precision),
    # of targets, always reported: see `errors`
    Metric("rmse", "RMSE"),
    Metric("mae", "MAE"),
    Metric("r2", "R2"),
    Metric("rmse_of_the_mean", "RMSE of predicting the mean"),
)
METRICS = {metric.name: metric for metric in METRICS}
ERRORS = "rmse", "mae"  # of targets, to choose by


def metrics_with(source):
    """Return the names of the metrics that have a function of this source: "from_logits", "from_ranks" or "from_scores"."""
    return tuple(name for name, metric in METRICS.items() if getattr(metric, source))


def scores_line(scores):
    """Format {'rmse': 0.71, 'hits@1': 0.5} as 'RMSE 0.7100  Hits@1 0.5000', None as 'n/a'."""
    if scores is None:
        return "n/a"

    def digits(value):
        if value is None:
            return "n/a"
        return f"{value:.4g}" if 0 < value < 1e-3 else f"{value:.4f}"

    titles = [getattr(METRICS.get(name), "title", name) for name in scores]
    return "  ".join(f"{title} {digits(scores[name])}" for title, name in zip(titles, scores))
