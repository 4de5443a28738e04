"""Whether times of edges and of seeds are in one unit, and which share of the edges seeds see."""

import numpy as np
import torch

from disk.columns import ALWAYS, span_of
from disk.files import StoreError

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
    noun = "ends of pairs" if task.are_links else "seeds"
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
    if task.are_links:
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
    stride = ((degrees + LONG - 1) // LONG).clamp(min=1)
    counts = (degrees + stride - 1) // stride
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
    seed_span = span_of(*map(int, times.aminmax()), unit)
    spans = {}
    for kind in np.unique(kinds).tolist():
        of = "edges"
        if store.edge_type is not None:
            of += f" {store.edge_types[kind] if store.edge_types else kind}"
        some = store.edge_time[places[torch.from_numpy(kinds == kind)]]
        spans[of] = span_of(*map(int, some.aminmax()), unit)
        if why := unlike(bulk(some), bulk(times)):
            raise StoreError(
                f"{store.path}: times of {of} are {spans[of]}, of seeds {seed_span}: {why}"
                "; give times in one unit, or --temporal off"
            )
    return {**spans, "seeds": seed_span}


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


def usual_times(flags, task):
    """Return [low, high, time_unit] of the times of nodes that seeds have, for a checkpoint."""
    _, times = timed_seeds(flags, task, task.store)
    return [*bulk(times), task.store.meta.get("time_unit")]


def other_times(flags, task, was):
    """Return a line if times of nodes are hardly in the unit of those trained on. was: of `usual_times`."""
    if flags.temporal == "off":
        return ""
    *was, unit = was
    *now, here = usual_times(flags, task)
    why = unlike(was, now)
    if unit != here:
        why = f"the {'first' if unit else 'second'} are dates, in microseconds, the others numbers"
    spans = f"{span_of(*was, unit)}, here {span_of(*now, here)}"
    return why and f"data    times of nodes were {spans}: {why}"
