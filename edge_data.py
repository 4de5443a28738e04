"""What a run makes of the weights, times and features of edges, and says about them.

    used, lines = edge_data(args, store)      # what --model, --sampler and --temporal take of a store's columns
    model.degrees = degrees_at(store.indptr, used.time, used.strict)      # for layers that use degrees

Letters: V nodes and M edges of the graph; N sources of a block; D width of the edges' features. This file needs
disk.py, model.py, own_model.py and torch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from disk import StoreError
from model import CONVS, EDGE_CONVS
from own_model import is_own, takes_edges


class EdgeData(NamedTuple):
    """The columns that a run uses; None for one that is not there or not used."""

    weight: Tensor | None = None  # float32 [M]: neighbours are drawn by it
    time: Tensor | None = None  # int64 [M]: no seed sees an edge later than its own time
    seed_time: Tensor | None = None  # int64 [V]: that time, for each node as a seed; None where links have times
    features: Tensor | None = None  # [M, D]: layers see them
    strict: bool = False  # True: a seed does not see edges at its own time either


def edge_data(args, store) -> tuple[EdgeData, list[str]]:
    """What a run uses of a store's columns -> (EdgeData, a line for each that is there).

    Raises:
        StoreError: for flags that need a column which the store does not have, or a model that cannot go with it.
    """
    used, lines, own = EdgeData(), [], is_own(args.model)
    can, must = takes_edges(args.model) if own else (args.model in EDGE_CONVS, args.model not in CONVS)
    if can and store.edge_features is not None:
        used = used._replace(features=store.edge_features)
        lines.append(f"the model sees the features of edges, {store.edge_dim} x {store.meta['edge_dtype']}")
    elif store.edge_features is not None:
        why = "its forward has no argument `edges`" if own else f"{' and '.join(EDGE_CONVS)} take them"
        lines.append(f"features of edges are not used by --model {args.model}: {why}")
    if must and used.features is None:
        instead = "give that argument a default to go without" if own else "gin is the same without"
        raise StoreError(f"--model {args.model} takes features of edges, and {store.path} has none; {instead}")
    links = args.task == "link"  # whose times are those of their edges
    timed = store.edge_time is not None and (links or store.node_time is not None)
    temporal = ("at" if timed else "off") if args.temporal == "auto" else args.temporal
    if temporal != "off" and not timed:
        raise StoreError(
            f"--temporal {temporal} needs times of edges and nodes (edge_time, node_time): {store.path} has "
            f"{'no times of edges' if store.edge_time is None else 'no times of nodes'}"
        )
    if temporal != "off":
        if args.model == "gcn":
            raise StoreError(
                "--model gcn divides by the degrees of the whole graph, which count edges of the future: take "
                "sage, gat or gin, or --temporal off"
            )
        seed_time = None if links else store.node_time
        used = used._replace(time=store.edge_time, seed_time=seed_time, strict=temporal == "before")
        when = "at their own time or before it" if temporal == "at" else "before their own time"
        who = "the ends of a pair and its negatives" if links else "seeds"
        lines.append(f"{who} see edges {when}, in every hop; --temporal off shows them all")
    elif store.edge_time is not None:
        why = "--temporal off" if timed else "nodes have none (node_time)"
        lines.append(f"times of edges are not used: {why}; seeds see edges of any time")
    if args.sampler == "latest":
        if used.time is None:
            raise StoreError(
                f"--sampler latest takes the last edges up to the time of each seed: it needs times of edges and nodes "
                f"in {store.path}, and --temporal at or before, here {args.temporal}"
            )
        lines.append("neighbours are the latest; exact inference counts all that a node may see")
    if args.sampler == "weighted":
        if store.edge_weight is None:
            raise StoreError(
                f"--sampler weighted draws neighbours by the weights of their edges, and {store.path} has none"
            )
        used = used._replace(weight=store.edge_weight)
        lines.append("neighbours are drawn by the weights of their edges; exact inference counts all edges alike")
    elif store.edge_weight is not None:
        lines.append("weights of edges are not used: --sampler weighted draws neighbours by them")
    return used, lines


def degrees_at(indptr, times, strict):
    """A function of a block: out- and in-degree of each of its sources at its time -> [N, 2]; for both the in-degree,
    the length of the part of its neighbour list that it may see.

    Args:
        indptr: int64 [V+1], times: int64 [M], rising in each list; in host memory.
    """

    def degrees(block):
        nodes, now = block.src_nodes.cpu().long(), block.src_times.cpu()
        first = indptr[nodes]
        low, high = first, indptr[nodes + 1]
        while bool((searched := low < high).any()):  # by halves, all lists at once
            middle = (low + high) // 2
            there = times[middle.clamp(max=len(times) - 1)]
            seen = there < now if strict else there <= now
            low, high = torch.where(searched & seen, middle + 1, low), torch.where(searched & ~seen, middle, high)
        return (low - first).unsqueeze(1).expand(-1, 2)

    return degrees
