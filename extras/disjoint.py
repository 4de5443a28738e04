"""Disjoint neighbourhoods: each seed has its own, with its own random draws, which do not depend on the other seeds of the
batch; seeds may then repeat. `src_seed` of a block says whose each source is.

    NeighborSampler(..., disjoint=True)     # takes times.py along
"""

import torch

from sampler import mix, signed

from .times import Pairs


class OfSeeds(Pairs):
    """Sources that are pairs: a key is node + V * position of the pair's seed."""

    def __init__(self, law, seeds, times):
        self.seeds = seeds.long()
        super().__init__(law, seeds, times)

    @staticmethod
    def groups(seeds, times):
        return times, torch.arange(seeds.numel(), device=seeds.device)

    def lists(self, hop):
        return super().lists(hop._replace(key=mix(signed(hop.key) ^ self.seeds[self.at])))

    def labelled(self, block):
        return super().labelled(block)._replace(src_seed=self.at.to(block.indptr.dtype))


def law(law, check, disjoint):
    """disjoint: True for a neighbourhood of its own for each seed."""
    return law._replace(pairing=OfSeeds, disjoint=True) if disjoint else law
