"""Which weights, times and features of edges a run uses, and the lines about them.

    used, lines = edge_data(args, task, store)    # columns that --model, --sampler and --temporal take
    model.degrees = degrees_at(store.indptr, used.time, used.strict)

The second line is for layers that divide by degrees, where seeds have times.
"""

from typing import NamedTuple

from torch import Tensor

from disk.files import StoreError
from model import CONVS, EDGE_CONVS
from run.own_model import is_own, takes_edges
from sampler import number_before


class EdgeData(NamedTuple):
    """The columns that a run uses; None where there is none or it is unused."""

    weight: Tensor | None = None  # float32 [M]: neighbours are drawn by it
    time: Tensor | None = None  # int64 [M]: no seed sees an edge later than its own time
    seed_time: Tensor | None = None  # int64 [V]: that time; None where links have times
    features: Tensor | None = None  # [M, D]: layers see them
    strict: bool = False  # a seed does not see edges at its own time either


def edge_data(args, task, store) -> tuple[EdgeData, list[str]]:
    """What a run uses of a store's columns -> (EdgeData, a line for each that is there); task: a `Task` or its class.
    StoreError for flags that need a column which the store lacks, or a model that cannot go with it."""
    used, lines, own = EdgeData(), [], is_own(args.model)
    can, must = args.model in EDGE_CONVS, args.model not in CONVS
    if own:
        can, must = takes_edges(args.model)
    if can and store.edge_features is not None:
        used = used._replace(features=store.edge_features)
        seen = f"{store.edge_dim} x {store.meta['edge_dtype']}"
        lines.append(f"the model sees the features of edges, {seen}")
    elif store.edge_features is not None:
        why = f"{' and '.join(EDGE_CONVS)} take them"
        why = "its forward has no argument `edges`" if own else why
        lines.append(f"features of edges are not used by --model {args.model}: {why}")
    elif must:
        instead = "give that argument a default to go without" if own else "gin is the same without"
        needs = f"--model {args.model} takes features of edges"
        raise StoreError(f"{needs}, and {store.path} has none; {instead}")
    timed = store.edge_time is not None and (task.timed_pairs or store.node_time is not None)
    temporal = ("at" if timed else "off") if args.temporal == "auto" else args.temporal
    if temporal != "off":
        check_times(args, store, timed)
        seed_time = None if task.timed_pairs else store.node_time
        used = used._replace(time=store.edge_time, seed_time=seed_time, strict=temporal == "before")
        when = "at their own time or before it" if temporal == "at" else "before their own time"
        who = "the ends of a pair and its negatives" if task.timed_pairs else "seeds"
        lines.append(f"{who} see edges {when}, in every hop; --temporal off shows them all")
    elif store.edge_time is not None:
        why = "--temporal off" if timed else "nodes have none (node_time)"
        lines.append(f"times of edges are not used: {why}; seeds see edges of any time")
    if args.sampler == "latest":
        if used.time is None:
            given = f"and --temporal at or before, here {args.temporal}"
            needs = f"times of edges and nodes in {store.path}"
            raise StoreError(f"--sampler latest takes the last edges by {needs}, {given}")
        lines.append("neighbours are the latest; exact inference counts all that a node may see")
    if args.sampler == "weighted":
        if store.edge_weight is None:
            how = "draws neighbours by the weights of edges"
            raise StoreError(f"--sampler weighted {how}, {store.path} has none")
        used = used._replace(weight=store.edge_weight)
        how = "are drawn by the weights of their edges"
        lines.append(f"neighbours {how}; exact inference counts all edges alike")
    elif store.edge_weight is not None:
        lines.append("weights of edges are not used: --sampler weighted draws neighbours by them")
    return used, lines


def check_times(args, store, timed):
    """Raise StoreError where times are missing, or the model cannot go without the future."""
    if not timed:
        lacks = "edges" if store.edge_time is None else "nodes"
        needs = f"--temporal {args.temporal} needs times of edges and nodes (edge_time, node_time)"
        raise StoreError(f"{needs}: {store.path} has no times of {lacks}")
    if args.model == "gcn":
        why = "divides by the degrees of the whole graph, edges of the future among them"
        raise StoreError(f"--model gcn {why}: take sage, gat or gin, or --temporal off")


def degrees_at(indptr, times, strict):
    """A function of a block: out- and in-degree of each source at its time -> [N, 2]; both are the number of edges in
    its neighbour list that it may see. indptr: int64 [V+1], times: int64 [M], ascending in each list; on the CPU."""

    def degrees(block):
        nodes = block.src_nodes.cpu().long()
        first = indptr[nodes]
        length = indptr[nodes + 1] - first
        seen = number_before(times, first, length, block.src_times.cpu(), strict)
        return seen.unsqueeze(1).expand(-1, 2)

    return degrees
