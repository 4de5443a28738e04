"""Float features that a store keeps as codes of 8 bits: 256 evenly spaced values of each column, from its smallest to its
largest, or if several types of nodes have features of each type's rows of it.

    features, scale, encode = encoder(features, node_types, folder, progress)     # a pass over the rows
    codes = encode(first, rows)                                       # int8 [n, F] of rows `first` to `first` + n - 1
    rows = CodedFeatures(codes, scale)                                # decoded by .gather, or in a FeatureRing

The scale is float32 [2, F], steps and offsets: a code stands for code * step + offset; a step is 0 if all values of a column
are equal. Or it is [T, 2, F], where the rows of each type end before `ends`, int64 [T]. Kernels that decode rows as they read
them are those of floats, with a scale (`decode` of native/vectors.h).
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from disk.checks import checked_rows
from disk.convert import Rows, gather_target, refuse, spool
from store import StoredFeatures


class CodedFeatures(StoredFeatures):
    """Feature rows float32 that are kept as codes of 8 bits.

    Attributes:
        stored: the codes, `MmapFeatures`, `LmdbFeatures` or a tensor, int8 [V, F]. scale, ends: see above; on their device.
        coded: the scale, for kernels that decode by one for all rows.
    """

    dtype = torch.float32

    def __init__(self, codes, scale, path=None, ends=None):
        self.stored = codes
        self.scale = scale
        self.ends = ends
        self.coded = {} if ends is not None else {"scale": scale}
        self.path = path
        self.shape = tuple(codes.shape)

    def over(self, rows, device=None):
        """Return features of other codes, which are decoded on a device."""
        scale, ends = (of if of is None else of.to(device) for of in (self.scale, self.ends))
        return CodedFeatures(rows, scale, self.path, ends)

    def gather(self, ids, out=None) -> Tensor:
        """Gather rows -> [n, F], by default on the device of the codes."""
        if isinstance(self.stored, Tensor):
            ids = ids.to(self.stored.device)
            codes = self.stored[ids]
        else:
            codes = self.stored.gather(ids)
        rows = codes.float() if out is None else gather_target(self, ids, out).copy_(codes)
        return self._scaled(rows, ids)

    def decode(self, rows, ids):
        """Return what codes of rows ids [n] stand for, float32; rows of floats are decoded already."""
        return rows if rows.is_floating_point() else self._scaled(rows.float(), ids)

    def _scaled(self, rows, ids):  # in two operations: GPUs round like CPUs
        steps, offsets = steps_and_offsets(self.scale, self.ends, ids)
        return rows.mul_(steps).add_(offsets)

    def _put(self, ids, rows):
        steps, offsets = steps_and_offsets(self.scale, self.ends, ids)
        codes = encoded(rows, steps, offsets)
        beyond = codes != codes.clamp(-128, 127)
        for at in beyond.nonzero()[:1]:
            step, offset = (of.expand_as(rows)[tuple(at)] for of in (steps, offsets))
            refuse(
                beyond,
                "rows",
                rows,
                f"its column was built for {offset - 128 * step:.6g} to {offset + 127 * step:.6g}",
            )
        self.stored.put_rows(ids, codes.to(torch.int8))


def coded_features(codes, meta, path):
    """Return what the codes in a store stand for -> CodedFeatures. meta: of the store."""
    scale = torch.tensor(meta["feature_scale"], dtype=torch.float32, device="cpu")
    ends = ends_of_types(meta.get("node_types", [])) if scale.dim() == 3 else None
    return CodedFeatures(codes, scale, path, ends)


def ends_of_types(node_types):
    """Return where the feature rows of each type end, int64 [T], of [(name, nodes, feature width or 0)] of all types; None
    unless several types have features."""
    counts = [count for _, count, width in node_types if width]
    return torch.tensor(counts, device="cpu").cumsum(0) if len(counts) > 1 else None


def steps_and_offsets(scale, ends, ids):
    """Return those of codes of rows ids [n]: [F] each, or [n, F] of a scale for each type."""
    if ends is None:
        return scale
    return scale[torch.bucketize(ids.to(ends.device), ends, right=True)].unbind(1)


def encoded(rows, steps, offsets) -> Tensor:
    """Compute the codes of rows [n, F], whole numbers in float64; beyond the range of their column outside [-128, 127]."""
    steps = steps.double()
    # any difference from a column's only value is out of range
    return ((rows.double() - offsets) / steps.clamp(min=1e-300)).round()


def encoder(features, node_types, folder, progress):
    """Return (features, the scale of their codes, a function (index of the first row, rows [n, F]) -> codes int8 [n, F])
    after a pass over the rows; `Rows`, which come once, are written to a file without a name in a folder meanwhile.
    node_types: as of `ends_of_types`."""
    ends = ends_of_types(node_types)
    bounds = [0, features.shape[0]] if ends is None else [0, *ends.tolist()]
    shape = len(bounds) - 1, features.shape[1]
    low = torch.full(shape, torch.inf, dtype=torch.float64, device="cpu")
    high = -low

    def chunks():
        for first, rows in checked_rows(features, progress):
            for ends, smallest, largest in zip(pairwise(bounds), low, high):
                start, stop = (max(bound - first, 0) for bound in ends)
                if len(part := rows[start:stop]):
                    torch.minimum(smallest, part.amin(0), out=smallest)
                    torch.maximum(largest, part.amax(0), out=largest)
            yield rows.float().numpy()

    if isinstance(features, Rows):
        features = spool(folder, chunks(), np.float32, features.shape[1])
    else:
        for _ in chunks():
            pass
    high, low = (of.masked_fill_(of.isinf(), 0) for of in (high, low))  # types without nodes
    steps = ((high - low) / 255).float()
    offsets = (low + 128 * steps.double()).float()
    for beyond, values in zip((128 * steps + offsets.abs()).isinf(), high):
        refuse(
            beyond,
            "the largest of each column of features",
            values,
            "int8 needs a range within float32",
        )
    scale = torch.stack([steps, offsets], 1)
    scale = scale[0] if ends is None else scale

    def encode(first, rows):
        ids = torch.arange(first, first + len(rows), device="cpu")
        return encoded(rows, *steps_and_offsets(scale, ends, ids)).clamp_(-128, 127).to(torch.int8)

    return features, scale, encode
