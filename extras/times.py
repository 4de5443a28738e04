"""Times: a node samples only edges no later than the time of the seed that reached it.

    sampler = NeighborSampler(..., edge_times=edge_times, strict=True, window=3600)     # method="latest"
    blocks = sampler.sample(seeds, step, times)

A source is a pair of a node and a time, so that a node may be among the seeds, and the sources, with several times.
"""

from typing import NamedTuple

from torch import Tensor

from sampler import Rule, Sources, kind

from . import column, number_before


class Cut(NamedTuple):
    """The cut of lists to the edges that their destinations see."""

    edge_times: Tensor  # int64 [M], ascending in each list
    strict: bool  # only edges before the destination's time; False: also those at it
    window: int  # only edges later than the destination's time minus this; 0: all

    def seen(self, start, degree, times):
        """Cut each list [S] to the edges that a destination at time [S] may take -> start, degree."""
        degree = number_before(self.edge_times, start, degree, times, self.strict)
        if not self.window:
            return start, degree
        since = times - self.window
        early = number_before(self.edge_times, start, degree, since, False)
        early = early.masked_fill(since > times, 0)  # `since` wrapped around: all edges are later
        return start + early, degree - early

    def __call__(self, lists, sources):
        start, degree = self.seen(lists.start, lists.degree, sources.times[lists.rows])
        return lists._replace(start=start, degree=degree)


RULE = Rule("latest", 2, "the last edges that the seed sees", needs="edge_times")


class Pairs(Sources):
    """Sources that are pairs: a key is node + V * index of the pair's time in `values`."""

    def __init__(self, law, seeds, times):
        self.values, numbers = self.groups(seeds, times)
        super().__init__(law, seeds + law.num_nodes * numbers, times)

    @staticmethod
    def groups(seeds, times):
        """Sort seeds into groups that share sources -> (times of the groups, the group of each seed int64 [S])."""
        return times.unique(return_inverse=True)

    def take(self, keys):
        V = self.law.num_nodes
        self.keys = keys
        self.at = keys // V
        self.nodes = keys % V
        self.times = None if self.values is None else self.values[self.at]

    def reached(self, indptr, ids):
        at = self.at.repeat_interleave(indptr.diff(), output_size=ids.numel())
        return ids + self.law.num_nodes * at

    def labelled(self, block):
        return block._replace(src_times=self.times)


def use(flags, task, store):
    """Hide edges later than a seed from it, if both have times and --temporal does not say otherwise."""
    from disk.files import StoreError
    from run.kinds import layers_where, plain_layers

    from .time_units import edges_seen

    timed = store.edge_time is not None and (task.are_links or store.node_time is not None)
    temporal = flags.temporal
    if temporal == "off" or temporal == "auto" and not timed:
        return {"lines": unused(flags, store, timed)}
    if not timed:
        lacks = "edges (edge_time)" if store.edge_time is None else "nodes (node_time)"
        if store.edge_time is None and store.node_time is not None:
            lacks += f"; {anew(store)}"
        if not flags.trains:
            lacks += "; --temporal off predicts from all edges"
        raise StoreError(f"--temporal {temporal}: {store.path} has no times of {lacks}")
    if flags.layer.whole_graph:
        *able, last = [n for n in plain_layers() if n in layers_where(whole_graph=False)]
        raise StoreError(
            f"--model {flags.model} divides by the degrees of the whole graph: "
            f"take {', '.join(able)} or {last}, or --temporal off"
        )
    # of a network of a file it is not known
    if store.edge_type is not None and flags.conv and not flags.conv.uses_types:
        raise StoreError(
            f"{store.path}: lists are by type, then time, and --model {flags.model} sees no types: "
            f"take {' or '.join(layers_where(uses_types=True))}, or --temporal off"
        )
    if str(flags.fanout[0]).startswith("any="):
        raise StoreError(
            "--fanout any= draws from all types together, and lists are sorted by type, then time: "
            "give numbers by type, or --temporal off"
        )
    strict = temporal == "before"
    who = "the ends of a pair and its negatives" if task.are_links else "seeds"
    when = "before their own time" if strict else "at their own time or before it"
    if flags.window:
        unit = " microseconds" * ("time_unit" in store.meta)
        when += f", of the last {flags.window}{unit}"
    lines = [f"{who} see edges {when}, in every hop; --temporal off shows them all"]
    lines += edges_seen(flags, task, store, strict)
    drawn = {}
    if flags.sampler == RULE.name:
        drawn = {"method": RULE.name}
        lines.append("neighbours are the latest; exact inference counts all that a node may see")
    seen = {"edge_times": store.edge_time, "strict": strict, "window": flags.window}
    used = {"flags": {"temporal": "before" if strict else "at"}, "lines": lines}
    if task.are_links:  # exact inference is as of the end of time: it sees all edges
        return used | {"drawn": seen | drawn}
    return used | {"drawn": drawn, "seen": seen, "times": store.node_time}


def unused(flags, store, timed):
    """Return the lines of a run whose seeds see edges of any time; StoreError for flags that need times to draw by, also
    those of a checkpoint, unless a run that only predicts has --temporal off."""
    from disk.files import StoreError

    needed = flags.trains or flags.temporal != "off"
    if needed and flags.window:
        raise StoreError(
            f"--window {flags.window} is of times, and seeds of {store.path} have none"
            + "; --temporal off predicts from all edges" * (not flags.trains)
        )
    if needed and flags.sampler == RULE.name:
        raise StoreError(
            "--sampler latest needs times of edges and nodes"
            f", and --temporal at or before, here {flags.temporal}"
        )
    if store.edge_time is None and store.node_time is not None:
        return [f"times of nodes are not used: edges have none (edge_time); {anew(store)}"]
    if store.edge_time is None:
        return []
    why = "--temporal off" if timed else "nodes have none (node_time)"
    return [f"times of edges are not used: {why}; seeds see edges of any time"]


def anew(store):
    """Say what to do with a store in which only nodes have times, as in those built before edges took times of sources."""
    return f"build {store.path} anew: an edge then has the time of its source"


def law(law, check, edge_times=None, strict=False, window=None):
    """edge_times: int64 [M], ascending in each neighbour list (within each type): `sample` then takes a time for each seed,
    and a node samples only edges no later than the time of the seed that reached it. strict: only edges before that time.
    window: int above 0: only edges later than that time minus this; None: all."""
    if edge_times is None:
        raise ValueError(f"{'strict' if strict else 'window'} needs edge_times")
    if law.label and not law.split:
        raise ValueError(
            "by_type=False is not for fanouts by type, nor for edge_times: lists are in type order"
        )
    if window is not None and (window % 1 != 0 or not 0 < window < 1 << 63):
        raise ValueError(f"window is {window}: give an int above 0")
    edge_times = column(law, "int64", edge_times=edge_times)
    cut = Cut(edge_times, bool(strict), int(window or 0))
    return law._replace(
        cuts=(cut,),
        pairing=Pairs,
        sorted_by=dict(law.sorted_by, edge_times=edge_times),
        native={**law.native, **cut._asdict()},
    )


def seeds_at(times, nodes=None):
    """Return a `draw` for `NodeLoader` that samples no edge later than its seed's time. times: int64 [V], of the nodes.

    With nodes int64 [n] and times int64 [n], a seed is an index i < n and stands for node nodes[i] at times[i], so that
    a node can be a seed at several times.
    """

    def draw(batch):
        seeds = batch.seeds.to(times.device)
        return seeds if nodes is None else nodes[seeds], {"times": times[seeds]}, None

    return draw


def times_of(law, seeds, times):
    """Return times int64 [S] of seeds; ValueError or TypeError if they are not what the law takes."""
    if not law.timed:
        raise ValueError("times are given but the edges have none; give the sampler edge_times")
    if kind(times) != f"torch.int64 {list(seeds.shape)}":
        raise TypeError(
            f"times must be int64 [S={seeds.numel()}], one for each seed, as edges have times, "
            f"not {kind(times)}"
        )
    return times


def degrees_at(sampler):
    """Return a function degrees(block) -> [N, 2]: out- and in-degree of each source node at its time, both the number
    of edges in its neighbour list that it may see. sampler: NeighborSampler with times, and without types."""
    law = sampler.spec
    if law.split:
        from disk.files import StoreError

        raise StoreError(
            "a layer counts degrees by time, and lists are sorted by type first; --temporal off shows all edges"
        )
    cut = law.cuts[0]

    def in_torch(nodes, times):
        nodes = nodes.to(law.indptr.device).long()
        first = law.indptr[nodes]
        return cut.seen(first, law.indptr[nodes + 1] - first, times.to(first.device))[1]

    count = getattr(sampler.engine, "degrees", in_torch)

    def at_times(block):
        return count(block.src_nodes, block.src_times).unsqueeze(1).expand(-1, 2)

    return at_times


def edge_times(flags):
    """Refuse a flag of times if edges of any time are seen."""
    if flags.temporal == "off":
        return "is of times, --temporal is off"


def flags(kinds):
    """Declare the flags of times."""
    return {
        "sampler": dict(
            temporal=kinds.per_graph(
                kinds.one_of("auto", "at", "before", "off"),
                "auto",
                "edges seen: at: to a seed's time, before: earlier, off: all (default: at; links off)",
            ),
            window=kinds.fixed(
                kinds.parsed_by(kinds.positive(int, below=2**63), "N"),
                None,
                "seeds see only edges of the last N (dates: microseconds; default: all)",
                needs=[edge_times],
            ),
        )
    }
