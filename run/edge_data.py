"""Which edge weights, times, types and features a run uses, and the lines printed about them.

used, lines = edge_data(args, task, store)    # columns that --model, --sampler and --temporal take
model.degrees = degrees_at(store.indptr, used)    # for layers that divide by degrees, where seeds have times
"""

from typing import NamedTuple

from torch import Tensor

from disk.columns import types_called
from disk.files import StoreError
from model import EDGE_CONVS, TYPE_CONVS
from run.own_model import is_own, takes_edges
from sampler import seen_at


class EdgeData(NamedTuple):
    """The columns that a run uses; None where there is none or it is unused."""

    weight: Tensor | None = None  # float32 [M]: neighbours are drawn by it
    time: Tensor | None = None  # int64 [M]: no seed sees an edge later than its own time
    seed_time: Tensor | None = None  # int64 [V]: that time; None where links have times
    features: Tensor | None = None  # [M, D]: layers see them
    strict: bool = False  # a seed does not see edges at its own time either
    window: int | None = None  # nor those that are older than this
    type: Tensor | None = None  # uint8 or uint16 [M]: neighbours are drawn by type
    num_types: int = 1
    type_names: list | None = None  # None: their numbers


def edge_data(args, task, store) -> tuple[EdgeData, list[str]]:
    """What a run uses of a store's columns -> (EdgeData, a line for each that is there); task: a `Task` or its class.
    StoreError for flags that need a column which the store lacks, or a model that cannot go with it."""
    used, lines, own = EdgeData(), [], is_own(args.model)
    built_in = args.model in EDGE_CONVS, args.model == "gine"
    can, must = takes_edges(args.model) if own else built_in
    if can and store.edge_features is not None:
        used = used._replace(features=store.edge_features)
        seen = f"{store.edge_dim} x {store.meta['edge_dtype']}"
        lines.append(f"the model sees the features of edges, {seen}")
    elif store.edge_features is not None:
        why = "its forward has no `edges`" if own else f"{' and '.join(EDGE_CONVS)} take them"
        lines.append(f"features of edges are not used by --model {args.model}: {why}")
    elif must:
        instead = "give that argument a default" if own else "gin is the same without"
        needs = f"--model {args.model} takes features of edges, and {store.path} has none"
        raise StoreError(f"{needs}; {instead}")
    used, line = typed_edges(args, store, used, own)
    lines += line
    timed = store.edge_time is not None and (task.timed_pairs or store.node_time is not None)
    temporal = ("at" if timed else "off") if args.temporal == "auto" else args.temporal
    if temporal != "off":
        if not timed:
            lacks = "edges (edge_time)" if store.edge_time is None else "nodes (node_time)"
            raise StoreError(f"--temporal {args.temporal}: {store.path} has no times of {lacks}")
        if args.model == "gcn":
            why = "divides by the degrees of the whole graph, edges of the future among them"
            raise StoreError(f"--model gcn {why}: take sage, gat or gin, or --temporal off")
        times = {"time": store.edge_time, "window": args.window, "strict": temporal == "before"}
        used = used._replace(**times, seed_time=None if task.timed_pairs else store.node_time)
        if store.edge_type is not None and used.type is None:
            sees = f"lists are by type, then time, and --model {args.model} sees no types"
            raise StoreError(f"{store.path}: {sees}: take rgcn, or --temporal off")
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
    draws = args.trains  # exact inference does not
    if draws and args.window and used.time is None:
        raise StoreError(f"--window {args.window} is of times, and seeds of {store.path} have none")
    if draws and args.sampler == "latest" and used.time is None:
        needs = "--sampler latest needs times of edges and nodes"
        raise StoreError(f"{needs}, and --temporal at or before, here {args.temporal}")
    if args.sampler == "latest" and used.time is not None:
        lines.append("neighbours are the latest; exact inference counts all that a node may see")
    if draws and args.sampler == "weighted" and store.edge_weight is None:
        raise StoreError(f"--sampler weighted draws by weights of edges, {store.path} has none")
    if args.sampler == "weighted" and store.edge_weight is not None:
        used = used._replace(weight=store.edge_weight)
        lines.append("neighbours are drawn by weight; exact inference counts all edges alike")
    elif store.edge_weight is not None:
        lines.append("weights of edges are not used: --sampler weighted draws neighbours by them")
    return used, lines


def typed_edges(args, store, used, own) -> tuple[EdgeData, list[str]]:
    """What a run uses of the types of edges -> (EdgeData, a line where there are some)."""
    if store.edge_type is not None and (own or args.model in TYPE_CONVS):
        count, names = store.num_edge_types, store.edge_types
        used = used._replace(type=store.edge_type, num_types=count, type_names=names)
        lists = hops(args.fanout, used)
        of = "each of them" if isinstance(lists[0], list) else "all together"
        if isinstance(lists[0], list) and 0 in sum(lists, []):
            of = "those it names, exact inference for all"
        return used, [f"edges have {count} types; --fanout is for {of}, and the model sees them"]
    if not all(isinstance(hop, int) for hop in args.fanout):
        why = f"it is for rgcn, or a model of your own, and a graph with types, here {store.path}"
        raise StoreError(f"--fanout {','.join(map(str, args.fanout))} names types: {why}")
    if args.model in TYPE_CONVS:
        raise StoreError(f"--model {args.model} takes types of edges, and {store.path} has none")
    unused = f"types of edges are not used by --model {args.model}: rgcn takes them"
    return used, [unused] if store.edge_type is not None else []


def hops(fanout, used):
    """--fanout as the sampler takes it: for each hop a number, or a list of one for each type of edges."""
    if used.type is None:
        return fanout
    if str(fanout[0]).startswith("any="):
        return [int(str(hop).removeprefix("any=")) for hop in fanout]
    names, lists = used.type_names or [*map(str, range(used.num_types))], []
    for hop in fanout:
        lists.append([hop if isinstance(hop, int) else 0] * len(names))
        for word in str(hop).split(":") if isinstance(hop, str) else ():
            name, _, k = word.rpartition("=")
            known = types_called(name, names)
            if not known:
                they = "; ".join(names)
                raise StoreError(f"--fanout {word}: no such type of edges; they are {they}")
            for i in known:
                if lists[-1][i]:
                    raise StoreError(f"--fanout {hop}: {names[i]} is there twice")
                lists[-1][i] = int(k)
    return lists


def degrees_at(indptr, used):
    """A function of a block: out- and in-degree of each source at its time -> [N, 2]; both are the number of edges in
    its neighbour list that it may see. indptr: int64 [V+1]; used: EdgeData with times, in host memory."""

    def degrees(block):
        nodes = block.src_nodes.cpu().long()
        first = indptr[nodes]
        lists = first, indptr[nodes + 1] - first, block.src_times.cpu()
        seen = seen_at(used.time, *lists, used.strict, used.window)[1]
        return seen.unsqueeze(1).expand(-1, 2)

    return degrees
