"""Which columns of edges and nodes a run uses, and the lines printed about them.

used, lines = edge_data(args, task, store)    # columns that --model, --sampler and --temporal take
"""

import re
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from disk.columns import ALWAYS, COLUMNS, span_of, types_called
from disk.files import StoreError
from extras.times import RULE as LATEST
from extras.weights import RULE as WEIGHTED
from model import layers_where, plain_layers
from run.own_model import takes_edges

SEEDS = 1 << 12  # seeds, and edges of the graph, whose times are compared
LONG = 1 << 10  # edges of a list that are looked at
# times that count from 1970, of 1973 to 2099, and dates as numbers: (what they look like, smallest, largest)
LOOKS = [
    ("dates such as 20240131", 18 * 10**6, 22 * 10**6),
    *(
        (f"{unit} since 1970", 10 ** (8 + 3 * i), 41 * 10 ** (8 + 3 * i))
        for i, unit in enumerate(("seconds", "milliseconds", "microseconds", "nanoseconds"))
    ),
]


class EdgeData(NamedTuple):
    """The columns that a run uses; None where there is none or it is unused. The field of a column edge_x is x, that of node_x
    is seed_x."""

    weight: Tensor | None = None  # float32 [M]: neighbours are drawn by it
    time: Tensor | None = None  # int64 [M]: no seed sees an edge later than its own time
    seed_time: Tensor | None = None  # int64 [V]: times of seed nodes; None if links have times
    features: Tensor | None = None  # [M, D]: edge features, an input of layers
    strict: bool = False  # edges at the seed's own time are hidden too
    window: int | None = None  # only edges later than the seed's time minus this are seen
    type: Tensor | None = None  # uint8 or uint16 [M]: neighbours are drawn by type
    num_types: int = 1
    type_names: list | None = None  # None: types are named by number
    numbers: Tensor | None = None  # int64 [num_types]: the network's numbers of the types, or None

    def seen_types(self):
        """Return the types [M] as the network numbers them, or None without types."""
        if self.type is None or self.numbers is None:
            return self.type
        numbers = self.numbers.numpy().astype(np.int16)
        return torch.from_numpy(numbers[self.type.numpy()])


def edge_data(args, task, store):
    """Choose the columns that a run uses -> (EdgeData, lines to print). task: a `Task` or its class.

    There is one function for each decision -> (entries of EdgeData, lines). Raises StoreError for flags that need a
    column the store lacks, or a model that cannot use one.
    """
    features, lines = features_used(args, store)
    types, of_types = types_used(args, store)
    times, of_times = times_used(args, task, store, by_type=bool(types))
    weights, of_weights = weights_used(args, store)
    lines += of_types + of_times + of_weights
    lines = [f"edges   {line}" for line in lines] + without_use(store)
    return EdgeData(**features, **types, **times, **weights), lines


def without_use(store):
    """Return a line for each column of the store that `EdgeData` has no field for."""
    lines = []
    for name, column in COLUMNS.items():
        field = name.removeprefix("edge_").replace("node_", "seed_")
        unused = field not in EdgeData._fields and not column.asked
        if getattr(store, name) is not None and unused:
            lines.append(f"{column.of}s   values of {name} are not used by this run")
    return lines


def features_used(args, store):
    """Edge features are inputs of layers and networks that take them."""
    conv = args.conv
    if conv is None:
        takes, must = takes_edges(args.model)
        why = "it does not ask for them"
        instead = "give that argument a default"
    else:
        takes = conv.sees_edges(args.edge_features)
        # of a checkpoint, `check_widths` compares the widths
        asked = args.edge_features and args.resume in (None, "auto")
        must = asked or conv.edge_features == "must"
        able = layers_where(edge_features="can") + layers_where(edge_features="must")
        others = ", ".join(layers_where(edge_features="asked"))
        why = {"can": "--no-edge-features", "asked": "--edge-features makes it take them"}.get(
            conv.edge_features, f"{' and '.join(able)} take them, {others} with --edge-features"
        )
        instead = f"{', '.join(plain_layers())} do without"
        if conv.edge_features != "must":
            instead = "leave out --edge-features"
    if store.edge_features is None:
        if must:
            raise StoreError(
                f"--model {args.model} takes features of edges, and {store.path} has none; {instead}"
            )
        return {}, []
    if not takes:
        return {}, [f"features of edges are not used by --model {args.model}: {why}"]
    seen = f"the model sees the features of edges, {store.edge_dim} x {store.meta['edge_dtype']}"
    return {"features": store.edge_features}, [seen]


def types_used(args, store):
    """Neighbours are drawn by type, or from all types, for layers that need types and for any network of a file."""
    conv = args.conv
    typed = layers_where(uses_types=True)
    if store.edge_type is not None and (conv is None or conv.uses_types):
        types = {
            "type": store.edge_type,
            "num_types": store.num_edge_types,
            "type_names": store.edge_types,
        }
        fanouts = hops(args.fanout, EdgeData(**types))
        of = "all together"
        if isinstance(fanouts[0], list):
            of = "each of them"
            if 0 in sum(fanouts, []):
                of = "those it names, exact inference for all"
        return types, [
            f"edges have {store.num_edge_types} types; --fanout is for {of}, and the model sees them"
        ]
    if not all(isinstance(hop, int) for hop in args.fanout):
        raise StoreError(
            f"--fanout {','.join(map(str, args.fanout))} names types: "
            f"it is for {', '.join(typed)}, or a model of your own, and a graph with types"
            f", here {store.path}"
        )
    if conv is not None and conv.uses_types:
        raise StoreError(f"--model {args.model} takes types of edges, and {store.path} has none")
    if store.edge_type is None:
        return {}, []
    return {}, [
        f"types of edges are not used by --model {args.model}: {' and '.join(typed)} take them"
    ]


def times_used(args, task, store, by_type):
    """Edges later than a seed are hidden from it, if both have times and --temporal does not say otherwise. by_type:
    whether the model sees types of edges."""
    timed = store.edge_time is not None and (task.timed_pairs or store.node_time is not None)
    temporal = args.temporal
    if temporal == "off" or temporal == "auto" and not timed:
        return {}, unused_times(args, store, timed)
    if not timed:
        lacks = "edges (edge_time)" if store.edge_time is None else "nodes (node_time)"
        if only_nodes_timed(store):
            lacks += f"; {anew(store)}"
        if not args.trains:
            lacks += "; --temporal off predicts from all edges"
        raise StoreError(f"--temporal {args.temporal}: {store.path} has no times of {lacks}")
    if args.layer.whole_graph:
        why = "divides by the degrees of the whole graph"
        *able, last = [n for n in plain_layers() if n in layers_where(whole_graph=False)]
        instead = f"take {', '.join(able)} or {last}, or --temporal off"
        raise StoreError(f"--model {args.model} {why}: {instead}")
    if store.edge_type is not None and not by_type:
        instead = f"take {' or '.join(layers_where(uses_types=True))}, or --temporal off"
        raise StoreError(
            f"{store.path}: lists are by type, then time, and --model {args.model} sees no types: {instead}"
        )
    if str(args.fanout[0]).startswith("any="):
        why = "lists are sorted by type, then time: give numbers by type, or --temporal off"
        raise StoreError(f"--fanout any= draws from all types together, and {why}")
    strict = temporal == "before"
    times = {"time": store.edge_time, "window": args.window, "strict": strict}
    who = "the ends of a pair and its negatives"
    if not task.timed_pairs:
        times["seed_time"] = store.node_time
        who = "seeds"
    when = "before their own time" if strict else "at their own time or before it"
    if args.window:
        unit = " microseconds" * ("time_unit" in store.meta)
        when += f", of the last {args.window}{unit}"
    lines = [f"{who} see edges {when}, in every hop; --temporal off shows them all"]
    lines += edges_seen(args, task, store, strict)
    if args.sampler == LATEST.name:
        lines.append("neighbours are the latest; exact inference counts all that a node may see")
    return times, lines


def edges_seen(args, task, store, strict):
    """Return a line on the share of their edges that a sample of seeds sees, and on the times of both.

    StoreError if times of edges and seeds are hardly in one unit, or if no training seed sees an edge."""
    nodes, times = timed_seeds(args, task, store)
    if not len(nodes) or not store.num_edges:
        return []
    places, seed, weight = edges_into(store, nodes)
    spans = spans_of_times(store, places, times)
    spans = "; ".join(f"times of {of} are {span}" for of, span in spans.items())
    if not len(places):
        return [f"no edge goes into seeds; {spans}"]
    when = store.edge_time[places]
    at = times[seed]
    seen = when < at if strict else when <= at
    if args.window:
        since = at - args.window
        seen &= (when > since) | (since > at)  # `since` wrapped around
    noun = "ends of pairs" if task.timed_pairs else "seeds"
    which = f"{len(seed.unique()):,} {'training ' * args.trains}{noun}"
    if args.trains and not seen.any():
        window = f" and a longer --window than {args.window}" * bool(args.window)
        raise StoreError(
            f"{store.path}: none of {which} sees an edge into it: {spans}"
            f"; give times in one unit{window}, edges from earlier to later nodes (--symmetrize), or"
            " --temporal off"
        )
    share = seen.double() @ weight.double() / weight.sum()
    line = f"{which} see {share:.1%} of the edges into them; {spans}"
    if always := int((when == ALWAYS).sum()):
        line += f"; {always / len(when):.1%} of the edges have no time and are always seen"
    return [line]


def timed_seeds(args, task, store):
    """Sample training seeds, or nodes if nothing is trained -> (nodes int64 [n], their times [n])."""
    if task.timed_pairs:
        pairs = store.pairs["train"]
        step = -(-len(pairs) // SEEDS)
        return pairs[::step].flatten(), store.pair_times["train"][::step].repeat_interleave(2)
    nodes = store.split["train"] if args.trains else torch.arange(store.num_nodes)
    nodes = nodes[:: max(-(-len(nodes) // SEEDS), 1)]
    return nodes, store.node_time[nodes]


def edges_into(store, nodes):
    """Find the edges into nodes [n], of long lists every so many -> (their places int64 [E], the index of the node of each
    [E], the number of edges that each stands for [E])."""
    first = store.indptr[nodes]
    degrees = store.indptr[nodes + 1] - first
    stride = (degrees + LONG - 1).div(LONG, rounding_mode="floor").clamp(min=1)
    counts = (degrees + stride - 1).div(stride, rounding_mode="floor")
    index = torch.repeat_interleave(counts)
    nth = torch.arange(len(index)) - (counts.cumsum(0) - counts)[index]
    stride = stride[index]
    return first[index] + nth * stride, index, stride


def spans_of_times(store, places, times):
    """Describe the times of edges, by type, and of seeds -> {of what: span}. places: of some edges; times: of seeds.

    StoreError if those of a type of edges are hardly in the unit of the seeds."""
    step = -(-store.num_edges // SEEDS)
    places = torch.cat([places, torch.arange(0, store.num_edges, step)])
    places = places[store.edge_time[places] != ALWAYS]
    kinds = np.zeros(len(places), int)
    if store.edge_type is not None:
        kinds = store.edge_type.numpy()[places.numpy()]
    unit = store.meta.get("time_unit")
    of_seeds = span_of(*map(int, times.aminmax()), unit)
    spans = {}
    for kind in np.unique(kinds).tolist():
        of = "edges"
        if store.edge_type is not None:
            of += f" {store.edge_types[kind] if store.edge_types else kind}"
        some = store.edge_time[places[torch.from_numpy(kinds == kind)]]
        spans[of] = span_of(*map(int, some.aminmax()), unit)
        if why := unlike(bulk(some), bulk(times)):
            raise StoreError(
                f"{store.path}: times of {of} are {spans[of]}, of seeds {of_seeds}: {why}"
                "; give times in one unit, or --temporal off"
            )
    return {**spans, "seeds": of_seeds}


def bulk(times):
    """Return the range (low, high) of nine tenths of some times: a few may stand for unknown ones."""
    ranks = (len(times) - 1) * torch.tensor([0.05, 0.95])
    return tuple(times.sort()[0][ranks.round().long()].tolist())


def unlike(edges, seeds):
    """Say why two ranges (low, high) of times are hardly in one unit, or return None."""
    looks = [look_of(*times) for times in (edges, seeds)]
    if None not in looks and looks[0] != looks[1]:
        return f"the first look like {looks[0]}, the second like {looks[1]}"
    small, large = sorted((edges, seeds), key=lambda times: times[1])
    # a single time may stand for the start or the end of all
    if small[0] == small[1] or large[0] == large[1] or small[1] < 10:
        return None
    ratio = large[1] / small[1]
    if large[0] >= 500 * small[1] or any(k / 2 <= ratio <= k * 2 for k in (1e3, 1e6, 1e9)):
        return f"one reaches {ratio:,.0f} times as far as the other"
    return None


def look_of(low, high):
    """Return what times from low to high look like, see LOOKS, or None."""
    return next((look for look, least, most in LOOKS if least <= low and high <= most), None)


def unused_times(args, store, timed):
    """Return the lines of a run whose seeds see edges of any time; StoreError for flags that need times to draw by, also
    those of a checkpoint, unless a run that only predicts has --temporal off."""
    needed = args.trains or args.temporal != "off"
    if needed and args.window:
        see = "--temporal off predicts from all edges" * (not args.trains)
        lacks = f"--window {args.window} is of times, and seeds of {store.path} have none"
        raise StoreError("; ".join(filter(None, (lacks, see))))
    if needed and args.sampler == LATEST.name:
        raise StoreError(
            "--sampler latest needs times of edges and nodes"
            f", and --temporal at or before, here {args.temporal}"
        )
    if only_nodes_timed(store):
        return [f"times of nodes are not used: edges have none (edge_time); {anew(store)}"]
    if store.edge_time is None:
        return []
    why = "--temporal off" if timed else "nodes have none (node_time)"
    return [f"times of edges are not used: {why}; seeds see edges of any time"]


def only_nodes_timed(store):
    """Whether nodes have times and edges do not, as in stores that were built before edges took those of their sources."""
    return store.edge_time is None and store.node_time is not None


def anew(store):
    """Say what to do with a store in which only nodes have times."""
    return f"build {store.path} anew: an edge then has the time of its source"


def weights_used(args, store):
    """Neighbours are drawn by the weights of their edges on request."""
    if args.sampler == WEIGHTED.name:
        if store.edge_weight is not None:
            said = "neighbours are drawn by weight; exact inference counts all edges alike"
            return {"weight": store.edge_weight}, [said]
        if args.trains:
            raise StoreError(f"--sampler weighted draws by weights of edges, {store.path} has none")
    if store.edge_weight is None:
        return {}, []
    return {}, ["weights of edges are not used: --sampler weighted draws neighbours by them"]


def hops(fanout, used):
    """Return --fanout as NeighborSampler takes it: for each hop a number, or a list with one for each edge type."""
    if used.type is None:
        return fanout
    if str(fanout[0]).startswith("any="):
        return [int(str(hop).removeprefix("any=")) for hop in fanout]
    names = used.type_names or [*map(str, range(used.num_types))]
    fanouts = []
    for hop in fanout:
        fanouts.append([hop if isinstance(hop, int) else 0] * len(names))
        for name, k in re.findall(r"(.+?)=(-1|0*[1-9][0-9]{0,8})(?::|$)", str(hop)):
            matching = types_called(name, names)
            if not matching:
                raise StoreError(
                    f"--fanout {name}={k}: no such type of edges; they are {'; '.join(names)}"
                )
            for i in matching:
                if fanouts[-1][i]:
                    raise StoreError(f"--fanout {hop}: {names[i]} is there twice")
                fanouts[-1][i] = int(k)
    return fanouts
