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


class NotFinite(ValueError):
    """A loss, a weight or a score is NaN or infinite."""


def check_scores(scores, what="scores"):
    """Raise NotFinite for scores that cannot be compared: NaN is neither above nor below any other."""
    if bad := scores.numel() - int(scores.isfinite().sum()):
        raise NotFinite(f"{bad:,} of {scores.numel():,} {what} are not finite")


def score(metric, logits, y):
    """A figure from 0 to 1 for logits [n, C] and y: int64 [n] classes, or [n, C] of 0 and 1; None without examples, and for
    a ROC-AUC of examples of one class. NotFinite for a logit that is NaN or infinite.

    metric: "accuracy": the share of right classes, of several labels a node the share of right entries. "f1": of
    classes the mean of each one's F1 (macro), of labels that of all entries together (micro). "roc_auc": the mean over
    labels, or over classes of one against the rest; those that are the same in all of y are left out.
    """
    if metric not in ("accuracy", "f1", "roc_auc"):
        raise ValueError(f"metric {metric!r} is unknown: choose accuracy, f1 or roc_auc")
    if not len(y):
        return None
    check_scores(logits)
    if metric == "roc_auc":
        if y.dim() == 1:
            logits, y = F.softmax(logits.double(), 1), F.one_hot(y, logits.shape[1])
            if y.shape[1] == 2:
                logits, y = logits[:, 1:], y[:, 1:]
        values = map(roc_auc, logits.unbind(1), y.unbind(1))
        values = [value for value in values if not math.isnan(value)]
        return sum(values) / len(values) if values else None
    found = logits.argmax(1) if y.dim() == 1 else logits > 0
    return (found == y).double().mean().item() if metric == "accuracy" else f1(found, y)


def f1(found, y):
    """F1 = 2 TP / (2 TP + FP + FN): of classes [n] the mean over those that occur in either; of 0 and 1 [n, C] one of
    all entries, 0 where there is no 1 in either."""
    if y.dim() == 2:
        hit, ones = (found.bool() & y.bool()).sum(), found.bool().sum() + y.bool().sum()
        return (2 * hit / ones.clamp(min=1)).item()
    size = int(max(found.max(), y.max())) + 1
    columns = y[found == y], found, y
    hit, ours, theirs = (torch.bincount(ids, minlength=size).double() for ids in columns)
    there = ours + theirs > 0
    return (2 * hit / (ours + theirs))[there].mean().item()


def _counts(score, y):
    """Counts of targets 1 and 0 at each distinct score, ascending -> two float64 tensors."""
    check_scores(score)
    values, rank = score.double().unique(return_inverse=True)
    ones = values.new_zeros(len(values)).index_add_(0, rank, y.double())
    return ones, rank.bincount(minlength=len(values)) - ones


def roc_auc(score, y):
    """Chance that an example with target 1 in y [n] has a higher score [n] than one with 0, ties half; nan without both."""
    ones, zeros = _counts(score, y)
    below = zeros.cumsum(0) - zeros / 2
    return ((ones * below).sum() / (ones.sum() * zeros.sum())).item()


def average_precision(score, y):
    """Precision at each distinct score [n], weighed by how much recall of y [n] rises there; nan without a target 1."""
    ones, zeros = (counts.flip(0) for counts in _counts(score, y))
    hit = ones.cumsum(0)
    return ((ones * hit / (hit + zeros.cumsum(0))).sum() / ones.sum()).item()


def binary_cross_entropy(logits, y):
    """Cross-entropy of logits [n, C] and targets 0 and 1 [n, C], a mean over C, summed over n."""
    y = y.to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, y, reduction="none").mean(1).sum()


def ranking(ranks):
    """Mean reciprocal rank and Hits@K for ranks [n], counted from 1 -> {name: figure}; nan without ranks."""
    check_scores(ranks)
    found = {"mrr": ranks.double().reciprocal().mean().item()}
    return found | {f"hits@{k}": (ranks <= k).double().mean().item() for k in (1, 10)}


def errors(output, y, mean):
    """RMSE and MAE of numbers [n, T], and the RMSE of predicting the mean [T] instead -> {name: figure}."""
    check_scores(output)
    y = y.double()  # squares of float32 may be infinite
    rmse, plain = (x.square().mean().sqrt().item() for x in (output - y, mean - y))
    return {"rmse": rmse, "mae": (output - y).abs().mean().item(), "rmse_of_the_mean": plain}


def scores_line(scores):
    """{'rmse': 0.71, 'hits@1': 0.5} -> 'RMSE 0.7100  Hits@1 0.5000'; None -> 'n/a'."""
    if scores is None:
        return "n/a"
    line = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items())
    line = line.replace("hits", "Hits")
    return re.sub(r"\b(rmse|mae|mrr|ap)\b", lambda name: name[0].upper(), line)
