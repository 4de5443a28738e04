"""Which edge weights, times, types and features a run uses, and the lines printed about them.

used, lines = edge_data(args, task, store)    # columns that --model, --sampler and --temporal take
model.degrees = degrees_at(store.indptr, used)    # for layers that divide by degrees, where seeds have times
"""

import re
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from disk.columns import types_called
from disk.files import StoreError
from model import layers_where
from run.own_model import conv_of, is_own, takes_edges
from sampler import LATEST, WEIGHTED, seen_at


class EdgeData(NamedTuple):
    """The columns that a run uses; None where there is none or it is unused."""

    weight: Tensor | None = None  # float32 [M]: neighbours are drawn by it
    time: Tensor | None = None  # int64 [M]: no seed sees an edge later than its own time
    seed_time: Tensor | None = None  # int64 [V]: times of seed nodes; None if links have times
    features: Tensor | None = None  # [M, D]: edge features, an input of layers
    strict: bool = False  # edges at the seed's own time are hidden too
    window: int | None = None  # only edges later than the seed's time minus this are seen
    type: Tensor | None = None  # uint8 or uint16 [M]: neighbours are drawn by type
    num_types: int = 1
    type_names: list | None = None  # None: types are named by number
    numbers: Tensor | None = (
        None  # int64 [num_types]: the network's numbers of the types; None: the same
    )

    def seen_types(self):
        """Return the types [M] as the network numbers them, or None without types."""
        if self.type is None or self.numbers is None:
            return self.type
        numbers = self.numbers.numpy().astype(np.int16)
        return torch.from_numpy(numbers[self.type.numpy()])


def edge_data(args, task, store) -> tuple[EdgeData, list[str]]:
    """Choose the edge columns that a run uses -> (EdgeData, a line to print for each column). task: a `Task` or its
    class. Raises StoreError for flags that need a column the store lacks, or a model that cannot use one."""
    used, lines, custom = EdgeData(), [], is_own(args.model)
    if custom:
        can, must = takes_edges(args.model)
    else:
        takes = conv_of(args.model).edge_features
        can, must = takes != "no", takes == "must"
    if can and store.edge_features is not None:
        used = used._replace(features=store.edge_features)
        seen = f"{store.edge_dim} x {store.meta['edge_dtype']}"
        lines.append(f"the model sees the features of edges, {seen}")
    elif store.edge_features is not None:
        why = (
            "it does not ask for them"
            if custom
            else f"{' and '.join(layers_where(edge_features='can') + layers_where(edge_features='must'))} take them"
        )
        lines.append(f"features of edges are not used by --model {args.model}: {why}")
    elif must:
        instead = "give that argument a default" if custom else "gin is gine without them"
        needs = f"--model {args.model} takes features of edges, and {store.path} has none"
        raise StoreError(f"{needs}; {instead}")
    used, of_types = typed_edges(args, store, used, custom)
    lines += of_types
    timed = store.edge_time is not None and (task.timed_pairs or store.node_time is not None)
    old = store.edge_time is None and store.node_time is not None
    anew = f"build {store.path} anew: an edge then has the time of its source"
    temporal = ("at" if timed else "off") if args.temporal == "auto" else args.temporal
    if temporal != "off":
        if not timed:
            lacks = "edges (edge_time)" if store.edge_time is None else "nodes (node_time)"
            lacks += f"; {anew}" * old
            raise StoreError(f"--temporal {args.temporal}: {store.path} has no times of {lacks}")
        if args.model == "gcn":
            why = "divides by the degrees of the whole graph"
            raise StoreError(f"--model gcn {why}: take sage, gat or gin, or --temporal off")
        times = {"time": store.edge_time, "window": args.window, "strict": temporal == "before"}
        used = used._replace(**times, seed_time=None if task.timed_pairs else store.node_time)
        if store.edge_type is not None and used.type is None:
            sees = f"lists are by type, then time, and --model {args.model} sees no types"
            raise StoreError(f"{store.path}: {sees}: take rgcn or rgat, or --temporal off")
        if str(args.fanout[0]).startswith("any="):
            why = "lists are sorted by type, then time: give numbers by type, or --temporal off"
            raise StoreError(f"--fanout any= draws from all types together, and {why}")
        when = "at their own time or before it" if temporal == "at" else "before their own time"
        when += f", of the last {args.window}" if args.window else ""
        who = "the ends of a pair and its negatives" if task.timed_pairs else "seeds"
        lines.append(f"{who} see edges {when}, in every hop; --temporal off shows them all")
    elif store.edge_time is not None:
        why = "--temporal off" if timed else "nodes have none (node_time)"
        lines.append(f"times of edges are not used: {why}; seeds see edges of any time")
    elif old:
        lines.append(f"times of nodes are not used: edges have none (edge_time); {anew}")
    draws = args.trains  # exact inference takes all neighbours
    if draws and args.window and used.time is None:
        raise StoreError(f"--window {args.window} is of times, and seeds of {store.path} have none")
    if args.sampler == LATEST.name and used.time is not None:
        lines.append("neighbours are the latest; exact inference counts all that a node may see")
    elif draws and args.sampler == LATEST.name:
        needs = f"--sampler {LATEST.name} needs times of edges and nodes"
        raise StoreError(f"{needs}, and --temporal at or before, here {args.temporal}")
    if args.sampler == WEIGHTED.name and store.edge_weight is not None:
        used = used._replace(weight=store.edge_weight)
        lines.append("neighbours are drawn by weight; exact inference counts all edges alike")
    elif store.edge_weight is not None:
        flag = f"--sampler {WEIGHTED.name}"
        lines.append(f"weights of edges are not used: {flag} draws neighbours by them")
    elif draws and args.sampler == WEIGHTED.name:
        flag = f"--sampler {WEIGHTED.name}"
        raise StoreError(f"{flag} draws by weights of edges, {store.path} has none")
    return used, lines


def typed_edges(args, store, used, custom) -> tuple[EdgeData, list[str]]:
    """Add edge types to `used` if the model takes them -> (EdgeData, [line to print] or []). custom: a user's model."""
    conv = conv_of(args.model)
    needed = conv is not None and conv.uses_types
    if store.edge_type is not None and (custom or needed):
        count, names = store.num_edge_types, store.edge_types
        used = used._replace(type=store.edge_type, num_types=count, type_names=names)
        fanouts = hops(args.fanout, used)
        of = "each of them" if isinstance(fanouts[0], list) else "all together"
        if of == "each of them" and 0 in sum(fanouts, []):
            of = "those it names, exact inference for all"
        return used, [f"edges have {count} types; --fanout is for {of}, and the model sees them"]
    if not all(isinstance(hop, int) for hop in args.fanout):
        why = f"it is for rgcn, rgat, or a model of your own, and a graph with types, here {store.path}"
        raise StoreError(f"--fanout {','.join(map(str, args.fanout))} names types: {why}")
    if needed:
        raise StoreError(f"--model {args.model} takes types of edges, and {store.path} has none")
    unused = f"types of edges are not used by --model {args.model}: rgcn and rgat take them"
    return used, [unused] if store.edge_type is not None else []


def hops(fanout, used):
    """Return --fanout as NeighborSampler takes it: for each hop a number, or a list with one for each edge type."""
    if used.type is None:
        return fanout
    if str(fanout[0]).startswith("any="):
        return [int(str(hop).removeprefix("any=")) for hop in fanout]
    names, fanouts = used.type_names or [*map(str, range(used.num_types))], []
    for hop in fanout:
        fanouts.append([hop if isinstance(hop, int) else 0] * len(names))
        for name, k in re.findall(r"(.+?)=(-1|0*[1-9][0-9]{0,8})(?::|$)", str(hop)):
            matching = types_called(name, names)
            if not matching:
                they = "; ".join(names)
                raise StoreError(f"--fanout {name}={k}: no such type of edges; they are {they}")
            for i in matching:
                if fanouts[-1][i]:
                    raise StoreError(f"--fanout {hop}: {names[i]} is there twice")
                fanouts[-1][i] = int(k)
    return fanouts


def degrees_at(indptr, used):
    """Return a function degrees(block) -> [N, 2]: out- and in-degree of each source node at its time, both the number
    of edges in its neighbour list that it may see. indptr: int64 [V+1]; used: EdgeData with times, in host memory."""

    def degrees(block):
        nodes = block.src_nodes.cpu().long()
        first = indptr[nodes]
        lists = first, indptr[nodes + 1] - first, block.src_times.cpu()
        seen = seen_at(used.time, *lists, strict=used.strict, window=used.window)[1]
        return seen.unsqueeze(1).expand(-1, 2)

    return degrees
