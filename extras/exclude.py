"""Edges to leave out of a batch, as if the graph did not have them: sample(..., exclude=edge ids or a mask)."""

from typing import NamedTuple

import torch
from torch import Tensor

from sampler import check_ids, check_range


def edge_set(exclude, indices, ordered=True):
    """Convert edge ids or a mask to distinct ascending ids -> int64 [X] on the graph's device; None if empty. Unless
    `ordered`, ids are in any order and may repeat."""
    M = indices.numel()
    if isinstance(exclude, Tensor) and exclude.dtype == torch.bool and exclude.shape == (M,):
        edges = exclude.nonzero().squeeze(1).to(indices.device)
    else:
        check_ids("exclude", exclude, f"edge ids, or a bool mask [M={M}]")
        edges = exclude.to(indices.device, torch.int64)
        edges = edges.unique() if ordered else edges
        check_range("exclude", edges, M, "edge")
    return edges if edges.numel() else None


class Cut(NamedTuple):
    """The cut of lists to the edges that are not excluded."""

    edges: Tensor  # int64 [X] excluded, ascending and distinct

    def __call__(self, lists, sources):
        exclude = self.edges
        gap = torch.searchsorted(
            exclude, lists.start
        )  # [R] index in exclude of the first in a list
        num_gaps = torch.searchsorted(exclude, lists.start + lists.degree) - gap
        # exclude[i] - i kept edges precede excluded edge i: a binary search in these gives how many to skip
        kept_before = exclude - torch.arange(exclude.numel(), device=exclude.device)

        def skip(edges, row):
            before = gap[row]
            return edges + torch.searchsorted(kept_before, edges - before, right=True) - before

        return lists._replace(degree=lists.degree - num_gaps, skip=skip)
