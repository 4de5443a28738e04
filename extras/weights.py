"""Draws by edge weight, without replacement (Efraimidis-Spirakis 2006); edges of weight 0 are never taken.

NeighborSampler(..., weights=weights)
"""

from functools import partial

import torch

from sampler import Rule, of

from . import column, pick_kept, ruled


def _keep_heaviest(law, lists, edges, row, place):
    """Mask [E] of the k largest log(uniform) / weight of each list. place: [E] of an edge in it."""
    weight = law.rule.column[edges].double()
    uniform = (lists.bits(row, lists.v[row], place).double() + 0.5) * 2.0**-32
    order = torch.argsort(uniform.log_().div_(weight), descending=True, stable=True)
    # sort by row again, each row's largest key first
    order = order[torch.argsort(row[order], stable=True)]
    rank = torch.empty_like(place).scatter_(0, order, place)
    return (rank < of(lists.k, row)) & (weight > 0)


RULE = Rule(
    "weighted",
    help="by edge weight",
    pick=partial(pick_kept, _keep_heaviest),
    needs="weights",
    header="weights",
)


def use(flags, task, store):
    """Draw neighbours by the weights of their edges with --sampler weighted."""
    from disk.files import StoreError

    weights = store.edge_weight
    if flags.sampler == RULE.name and weights is not None:
        said = "neighbours are drawn by weight; exact inference counts all edges alike"
        return {"drawn": {"weights": weights}, "lines": [said]}
    if flags.sampler == RULE.name and flags.trains:
        raise StoreError(f"--sampler weighted draws by weights of edges, {store.path} has none")
    if weights is None:
        return {}
    return {"lines": ["weights of edges are not used: --sampler weighted draws neighbours by them"]}


def law(law, check, weights):
    """weights: float [M], in the order of `indices` as all columns here, not negative."""
    weights = column(law, "float16, bfloat16, float32 or float64", weights=weights)
    if check and not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise ValueError("weights contains a negative, infinite or NaN value")
    return ruled(law, RULE, "weights")._replace(rule=RULE._replace(column=weights))
