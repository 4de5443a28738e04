"""Edges to leave out of a batch, as if the graph did not have them: sample(..., exclude=edge ids or a mask)."""

from typing import NamedTuple

import torch
from torch import Tensor

from sampler import check_ids, check_range


def edge_set(exclude, indices, ordered=True):
    """Convert edge ids or a mask to a `Cut` or, unless `ordered`, to ids int64 [X] on the graph's device, in any order, some
    perhaps repeated; None if empty."""
    M = indices.numel()
    if isinstance(exclude, Tensor) and exclude.dtype == torch.bool and exclude.shape == (M,):
        edges = exclude.nonzero().squeeze(1).to(indices.device)
    else:
        check_ids("exclude", exclude, f"edge ids, or a bool mask [M={M}]")
        edges = exclude.to(indices.device, torch.int64)
        check_range("exclude", edges, M, "edge")
    if not edges.numel():
        return None
    return Cut(edges.unique()) if ordered else edges


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

    def fields(self, M):
        """Index the edges by ranges of 2^shift of the M edges of the graph -> fields of job_t of native/sampler.c."""
        num = self.edges.numel()
        # about eight times as many ranges as excluded edges
        shift = max(0, M.bit_length() - (8 * num).bit_length())
        counts = torch.bincount(self.edges >> shift, minlength=(M >> shift) + 1)
        before = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return dict(excluded=self.edges, excluded_before=before, num_excluded=num, shift=shift)
