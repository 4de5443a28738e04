"""Metrics: accuracy, F1, ROC-AUC, average precision, MRR, Hits@K, RMSE, MAE.

    score("f1", logits, y)                       # y: classes [n], or 0 and 1 for each of C labels [n, C]
    roc_auc(score, y), average_precision(score, y)
    ranking(ranks)                               # {"mrr": ..., "hits@1": ..., "hits@10": ...}

Every metric depends only on the pairs of score and target, not on their order, and agrees with scikit-learn's of the
same name, ties included. n examples, C classes or labels.
"""

import math
import re

import torch
from torch.nn import functional as F

from native import layers

RANKINGS = "mrr", "hits@1", "hits@10"


class NotFinite(ValueError):
    """A loss, a weight or a score is NaN or infinite."""


def check_scores(scores, noun="scores"):
    """Raise NotFinite for scores that cannot be compared: NaN is neither above nor below any other."""
    if bad := scores.numel() - int(scores.isfinite().sum()):
        raise NotFinite(f"{bad:,} of {scores.numel():,} {noun} are not finite")


def score(metric, logits, y):
    """Compute a metric, from 0 to 1, of logits [n, C] for y: classes int64 [n], or multi-labels [n, C] of 0 and 1, with -1
    for one that is missing and left out. None without labels, and for the ROC-AUC of one class alone; NotFinite for a
    logit that is NaN or infinite.

    metric: "accuracy": the share of right classes, or of right entries if multi-label. "f1": macro F1 over classes, or
    micro F1 over all entries if multi-label. "roc_auc": the mean over labels, or over classes one against the rest,
    without those that are the same wherever y has them.
    """
    if metric not in ("accuracy", "f1", "roc_auc"):
        raise ValueError(f"metric {metric!r} is unknown: choose accuracy, f1 or roc_auc")
    present = y >= 0
    if not present.any():
        return None
    check_scores(logits)
    if metric == "roc_auc":
        if y.dim() == 1:
            logits, y = logits[present], y[present]
            logits, y = F.softmax(logits.double(), 1), F.one_hot(y, logits.shape[1])
            if y.shape[1] == 2:
                logits, y = logits[:, 1:], y[:, 1:]
        columns = zip(logits.unbind(1), y.unbind(1))
        values = [roc_auc(column[of >= 0], of[of >= 0]) for column, of in columns]
        values = [value for value in values if not math.isnan(value)]
        return sum(values) / len(values) if values else None
    pred = logits.argmax(1) if y.dim() == 1 else logits > 0
    if metric == "accuracy":
        return (pred == y)[present].double().mean().item()
    if y.dim() == 2:
        return f1(pred & present, y * present)
    return f1(pred[present], y[present])


def f1(pred, y):
    """Compute F1 = 2 TP / (2 TP + FP + FN): for classes [n] macro, over those in `pred` or y; for 0 and 1 [n, C] micro,
    and 0 if neither has a 1."""
    if y.dim() == 2:
        hit, ones = (pred.bool() & y.bool()).sum(), pred.bool().sum() + y.bool().sum()
        return (2 * hit.double() / ones.clamp(min=1)).item()
    size = int(max(pred.max(), y.max())) + 1
    columns = y[pred == y], pred, y
    hits, predicted, actual = (torch.bincount(ids, minlength=size).double() for ids in columns)
    present = predicted + actual > 0
    return (2 * hits / (predicted + actual))[present].mean().item()


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


def cross_entropy(logits, y):
    """Compute the cross-entropy of logits [n, C] and classes [n], of which -1 does not count, summed over n."""
    loss = layers.cross_entropy(logits, y)
    return F.cross_entropy(logits, y, reduction="sum", ignore_index=-1) if loss is None else loss


def binary_cross_entropy(logits, y):
    """Compute the cross-entropy of logits [n, C] and targets 0 and 1 [n, C], averaged over those of a row that are not -1
    (missing), summed over n."""
    present, y = y >= 0, y.to(logits.dtype).clamp(min=0)
    values = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    return mean_of_present(values, present).sum()


def mean_of_present(values, present):
    """Average the entries of each row of values [n, C] where the mask `present` [n, C] is true -> [n]; 0 without any.
    Shapes are static, as CUDA graphs need them."""
    share = present.shape[1] / present.sum(1).clamp(min=1).to(values.dtype)
    return values.where(present, 0).mean(1) * share


def ranking(ranks):
    """Compute MRR, Hits@1 and Hits@10 of ranks [n], counted from 1 -> {name: value}; values are None without ranks."""
    if not len(ranks):
        return dict.fromkeys(RANKINGS)
    check_scores(ranks)
    mrr = {"mrr": ranks.double().reciprocal().mean().item()}
    return mrr | {f"hits@{k}": (ranks <= k).double().mean().item() for k in (1, 10)}


def errors(output, y, mean):
    """Compute RMSE and MAE of `output` [n, T], and the RMSE of predicting `mean` [T], where y is not NaN -> {name: value}."""
    check_scores(output)
    y, present = y.double(), ~y.isnan()  # squares of float32 may be infinite
    error, of_mean = (output - y)[present], (mean - y)[present]
    rmse, baseline = (x.square().mean().sqrt().item() for x in (error, of_mean))
    return {"rmse": rmse, "mae": error.abs().mean().item(), "rmse_of_the_mean": baseline}


def scores_line(scores):
    """Format {'rmse': 0.71, 'hits@1': 0.5} as 'RMSE 0.7100  Hits@1 0.5000', None as 'n/a'."""
    if scores is None:
        return "n/a"

    def digits(value):
        if value is None:
            return "n/a"
        return f"{value:.{'4g' if 0 < value < 1e-3 else '4f'}}"

    return "  ".join(f"{metric_name(name)} {digits(v)}" for name, v in scores.items())


def metric_name(name):
    """Spell a metric as papers do: roc_auc -> ROC-AUC."""
    name = name.replace("hits", "Hits").replace("roc_auc", "ROC-AUC")
    name = name.replace("of_the_mean", "of predicting the mean").replace("_", " ")
    return re.sub(r"\b(rmse|mae|mrr|ap|f1)\b", lambda word: word[0].upper(), name)
