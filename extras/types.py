"""Types of edges: each type's edges are sampled as if they were the whole list, with their own fanout and random draws.

NeighborSampler(indptr, indices, [[10, 3], [5, 0]], edge_type=edge_type)     # 10 of type 0, 3 of type 1, ...
"""

import re
from typing import NamedTuple

import torch
from torch import Tensor

from sampler import MOST_EDGES, Lists, expand, mix, of, signed

from . import column

NO_TYPE = -2  # fanout of a type that does not exist, as in native/rule.h


def as_signed(types):
    """View uint16 as int16 and back, because torch has few operations for uint16; uint8 is unchanged."""
    other = {torch.uint16: torch.int16, torch.int16: torch.uint16}
    return types.view(other.get(types.dtype, types.dtype))


class Split(NamedTuple):
    """The edges of a type as a list of their own."""

    types: Tensor  # uint8 or int16 [M], ascending in each list
    fanouts: Tensor  # int64 [L, 256 or 65536] k per hop and type, NO_TYPE: no such type

    def __call__(self, lists, hop):
        places = expand(lists.start, lists.degree)
        row = torch.repeat_interleave(lists.degree)
        group = (self.types.index_select(0, places).long() & 0xFFFF) + (row << 16)
        group, counts = group.unique_consecutive(return_counts=True)
        row = group >> 16
        kind = group & 0xFFFF
        ks = self.fanouts[hop.index, kind]
        if not ks.is_cuda and bool((ks == NO_TYPE).any()):
            raise IndexError("a type that does not exist")
        return Lists(
            rows=row,
            v=lists.v[row],
            start=places[counts.cumsum(0) - counts],
            degree=counts,
            k=torch.where(ks < 0, MOST_EDGES, ks),
            key=mix(signed(of(lists.key, row)) ^ (1 << 32) + kind),
        )


class Label(NamedTuple):
    """Adds edge_type to a block."""

    edge_type: Tensor  # uint8 or int16 [M]
    numbers: Tensor | None  # int64 [T], what blocks have in place of each type
    edge_ids: bool  # whether blocks keep theirs

    def whole_graph(self):
        """Return the types [M] of all edges as blocks have them."""
        if self.numbers is None:
            return self.edge_type
        return self.numbers.to(self.edge_type.device, torch.int16)[self.edge_type.int()]

    def __call__(self, block):
        types = block.edge_type
        if types is None:  # the C code returns them with the block
            types = self.edge_type.index_select(0, block.edge_ids)
        types = as_signed(types)
        if self.numbers is not None:
            types = self.numbers.to(types.device)[types.long()]
        return block._replace(edge_type=types, edge_ids=block.edge_ids if self.edge_ids else None)


def use(flags, task, store):
    """Draw neighbours by type, or from all types, for layers that need types and for any network of a file."""
    from disk.files import StoreError
    from run.kinds import layers_where

    conv = flags.conv
    typed = layers_where(uses_types=True)
    if store.edge_type is not None and (conv is None or conv.uses_types):
        names = store.edge_types or [*map(str, range(store.num_edge_types))]
        fanouts = hops(flags.fanout, names)
        by_type = isinstance(fanouts[0], list)
        of = "all together"
        if by_type:
            of = "each of them"
            if 0 in sum(fanouts, []):
                of = "those it names, exact inference for all"
        line = f"edges have {len(names)} types; --fanout is for {of}, and the model sees them"
        return {
            "seen": dict(edge_type=store.edge_type, num_types=len(names)),
            "drawn": dict(fanouts=fanouts, by_type=by_type),
            "lines": [line],
        }
    if not all(isinstance(hop, int) for hop in flags.fanout):
        raise StoreError(
            f"--fanout {','.join(map(str, flags.fanout))} names types: "
            f"it is for {', '.join(typed)}, or a model of your own, and a graph with types"
            f", here {store.path}"
        )
    if conv is not None and conv.uses_types:
        raise StoreError(f"--model {flags.model} takes types of edges, and {store.path} has none")
    if store.edge_type is None:
        return {}
    who = " and ".join(typed)
    return {"lines": [f"types of edges are not used by --model {flags.model}: {who} take them"]}


def hops(fanout, names):
    """Return --fanout as NeighborSampler takes it: for each hop a number, or a list with one for each of these types."""
    from disk.columns import types_called
    from disk.files import StoreError

    if str(fanout[0]).startswith("any="):
        return [int(str(hop).removeprefix("any=")) for hop in fanout]
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


def law(law, check, *, edge_type=None, by_type=True, type_numbers=None, num_types=0):
    """edge_type: uint8 or uint16 [M] below 2^15, ascending in each neighbour list. A fanout then is a number for each type, or
    a list with one number per type: [[10, 3], [5, 0]]. by_type: False samples as if the edges
    had no types; not with edge_times. type_numbers: int64 [T], what blocks have in place of each type. num_types: how many
    there are, if more than in edge_type, or known: unless `check`, this is then not read."""
    fanouts = law.fanouts
    all_lists = all(isinstance(k, list) for k in fanouts)
    if edge_type is None:
        raise ValueError(f"fanouts {fanouts}, by_type={by_type}: fanouts by type need edge_type")
    types = as_signed(column(law, "uint8 or uint16", edge_type=edge_type))
    label = Label(types, type_numbers, law.edge_ids)
    law = law._replace(label=label, edge_ids=True)
    if not by_type:
        if any(isinstance(k, list) for k in fanouts):
            raise ValueError(
                f"fanouts {fanouts}: by_type=False is not for fanouts by type, nor for edge_times: lists are in type order"
            )
        return law
    if types.numel() and (check or not (all_lists or num_types)):
        low, high = map(int, types.aminmax())
        if low < 0:
            raise ValueError("edge_type has types above 32767, which is the largest")
        num_types = max(num_types, high + 1)
    num_types = max(num_types, 1)
    lists = [k if isinstance(k, list) else [k] * num_types for k in fanouts]
    table = torch.full((len(lists), 256 if types.dtype == torch.uint8 else 1 << 16), NO_TYPE)
    if not all(num_types <= len(numbers) <= table.shape[1] for numbers in lists):
        raise ValueError(
            f"fanouts {fanouts}: edge_type has {num_types} types, one number for each is needed"
        )
    for row, numbers in zip(table, lists):
        row[: len(numbers)] = torch.tensor(numbers)
    split = Split(types, table.to(types.device))
    return law._replace(
        split=split,
        fanouts=[-1 if -1 in numbers else sum(numbers) for numbers in lists],
        sorted_by=dict(law.sorted_by, edge_type=types),
        native={**law.native, **split._asdict()},
    )
