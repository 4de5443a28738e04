"""Times: a node samples only edges no later than the time of the seed that reached it.

    sampler = NeighborSampler(..., edge_times=edge_times, strict=True, window=3600)     # method="latest"
    blocks = sampler.sample(seeds, step, times)

A source is a pair of a node and a time, so that a node may be among the seeds, and the sources, with several times.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sampler import Rule, Sources, kind


def number_before(edge_times, start, degree, times, strict):
    """Count each list's edges no later than its time (earlier if strict), by vectorized binary search -> int64 [S]."""
    count = torch.zeros_like(degree)
    before = start - 1
    for bit in reversed(range(int(degree.max()).bit_length() if degree.numel() else 0)):
        more = count + (1 << bit)  # count them all if the last of them is early enough
        last = edge_times.index_select(0, (before + more).clamp_(max=edge_times.numel() - 1))
        early = ((last < times) if strict else (last <= times)) & (more <= degree)
        count = torch.where(early, more, count)
    return count


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
    """Sources that are pairs: src holds node + V * index of the pair's time in `values`."""

    def __init__(self, backend, seeds, times):
        super().__init__(backend, seeds, times)
        self.values, number = times.unique(return_inverse=True)  # [T], [S]
        self.pair(seeds + self.law.num_nodes * number)

    def pair(self, src):
        """Take pairs as the sources."""
        V = self.law.num_nodes
        self.src = src
        self.at = src // V
        self.nodes = src % V
        self.times = None if self.values is None else self.values[self.at]

    def distinct(self):
        return self.src.unique().numel() == self.src.numel()

    def number(self, indptr, ids):
        """Append pairs that are not sources yet, by first appearance -> position of each edge's pair among all."""
        src = self.src
        at = self.at.repeat_interleave(indptr.diff(), output_size=ids.numel())
        pairs = torch.cat([src, ids + self.law.num_nodes * at])
        values, inverse = pairs.unique(return_inverse=True)
        place = torch.arange(inverse.numel(), device=src.device)
        first = torch.full_like(values, inverse.numel()).scatter_reduce_(0, inverse, place, "amin")
        order = first.argsort()
        number = torch.empty_like(order).scatter_(0, order, place[: order.numel()])
        self.pair(values[order])
        return number[inverse[src.numel() :]]

    def labelled(self, block):
        return block._replace(src_times=self.times)

    def done(self):
        pass


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
    edge_times = law.column("int64", edge_times=edge_times)
    cut = Cut(edge_times, bool(strict), int(window or 0))
    return law._replace(
        cuts=(cut,),
        pairing=Pairs,
        sorted_by=dict(law.sorted_by, edge_times=edge_times),
        native={**law.native, **cut._asdict()},
    )


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
    of edges in its neighbour list that it may see. sampler: NeighborSampler with times."""
    law = sampler.spec
    cut = law.cuts[0]

    def in_torch(nodes, times):
        nodes = nodes.to(law.indptr.device).long()
        first = law.indptr[nodes]
        return cut.seen(first, law.indptr[nodes + 1] - first, times.to(first.device))[1]

    count = getattr(sampler.engine, "degrees", in_torch)

    def at_times(block):
        return count(block.src_nodes, block.src_times).unsqueeze(1).expand(-1, 2)

    return at_times
