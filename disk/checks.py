"""Validate the arrays of a graph before they become a store, and count its unusual edges.

    meta["edges"] = count_edges(indptr, indices)      # once, when a store is built
    print(edge_line(store))                           # 4,300 edges: 2,000 duplicates, 300 self loops, ...

Invalid values raise StoreError.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from disk.convert import (
    KEPT_AS,
    array_like,
    as_numpy,
    as_rows,
    by_part,
    check_finite,
    chunked,
    edge_pairs,
    integers,
    part_ids,
    refuse,
    row_dtype,
    shaped,
)
from disk.files import SPLITS, StoreError, listed, plural

MAX_CLASSES = 1 << 24  # the logits of 1,024 seeds then take 64 GiB
MAX_SPLITS = 1 << 16
EDGE_CHUNK = 1 << 22  # edges read at a time
# with up to EXACT edges the reverse of each is looked up, with more those of SAMPLE random edges
EXACT = 1 << 20
SAMPLE = 1 << 16
COMPARED = 1 << 22  # cells of features that are compared with labels
# in the meta.json of a store that was built without a split
DRAWN_NODES = "a tenth of the nodes for testing, a tenth for validation, the rest for training"
DRAWN = "20 nodes of each class for training, 30 for validation, the rest for testing"
DRAWN_GRAPHS = "a tenth of the graphs for testing, a tenth for validation, the rest for training"


def check_features(features, kept_as):
    """Return (V, F, dtype name) of the features as stored: in their own dtype, or `kept_as`, one of KEPT_AS."""
    shape = tuple(getattr(features, "shape", ()))
    if len(shape) != 2 or 0 in shape:
        raise StoreError(f"features has shape {list(shape)}: [V, F] is needed, neither of them 0")
    dtype = row_dtype("features", features)
    if kept_as and (kept_as not in KEPT_AS or "float" not in dtype):
        raise StoreError(
            f"feature_dtype {kept_as} with features of {dtype}: "
            f"features of floats can be kept as {' or '.join(KEPT_AS)}"
        )
    return int(shape[0]), int(shape[1]), kept_as or dtype


def check_labels(labels, num_nodes, num_classes):
    """Check labels -> (int64 [V], or int8 [V, C] of 0 and 1 if multi-label; C, counted if None). -1: no label."""
    if labels is None:
        return np.full(num_nodes, -1), num_classes or 1
    labels = integers("labels", labels)
    shaped("labels", labels, num_nodes, *["C"] * (labels.ndim > 1))
    if (labels == -1).all():
        raise StoreError(f"labels: none of the {num_nodes} nodes has a label, all are -1")
    if labels.ndim == 2:
        if not 2 <= labels.shape[1] <= MAX_CLASSES or num_classes not in (None, labels.shape[1]):
            raise StoreError(
                f"labels is {list(labels.shape)} and num_classes {num_classes}"
                f": with several labels per node, 2 <= C <= {MAX_CLASSES:,}"
            )
        why = "several labels per node are each 0 or 1, or -1 for a missing one"
        refuse((labels < -1) | (labels > 1), "labels", labels, why)
        if (labels == -1).any() and not (labels == 0).any():
            raise StoreError(f"labels: {why}: there is no 0")
        return labels.astype(np.int8), labels.shape[1]
    if num_classes is None:
        num_classes = max(int(labels.max()) + 1, 1)
        present = len(np.unique(labels[labels >= 0])) if num_classes > 1000 else 1
        if num_classes > 1000 + 10 * present:
            raise StoreError(
                f"labels run up to {num_classes - 1:,} and {present:,} different ones occur"
                ": number them from 0, each class is a row of the last layer"
            )
    if not 1 <= num_classes <= MAX_CLASSES:
        raise StoreError(
            f"num_classes is {num_classes}, of labels numbered from 0: "
            f"from 1 to {MAX_CLASSES:,} are possible, each is a row of the last layer"
        )
    why = f"labels lie in [0, {num_classes}), or are -1"
    refuse((labels < -1) | (labels >= num_classes), "labels", labels, why)
    return labels, num_classes


def check_targets(name, targets, num_nodes):
    """Check numbers to be learned, [V] or [V, T], NaN for a missing one -> (float64 [V, T], T)."""
    y = as_rows(name, targets)
    y = shaped(name, y[:, None] if y.dim() == 1 else y, num_nodes, "T").double().numpy()
    beyond = np.abs(y) > np.finfo(np.float32).max
    refuse(beyond, name, y, "float32 must hold targets; NaN stands for a missing one")
    if np.isnan(y).all():
        raise StoreError(f"{name}: all are NaN: no node has one")
    return y, y.shape[1]


def missing(labels):
    """Return where labels, an array, are missing: -1, or NaN of numbers."""
    return np.isnan(labels) if labels.dtype.kind == "f" else labels < 0


def doubts(store, counted) -> list[str]:
    """Return sentences on what is probably not meant in the labels and features of an open GraphStore.

    counted: whether the number of classes was taken from the labels. Up to COMPARED cells of features of training nodes
    drawn by seed 0 are compared with labels, see `telling`.
    """
    labels = store.labels
    lines = []
    if store.targets:
        return lines
    if counted and store.labelled and labels.dim() == 1:
        nodes_of = labels[labels >= 0].bincount(minlength=store.num_classes)
        empty = (nodes_of == 0).nonzero().flatten().tolist()
        if empty:
            lines.append(
                f"{len(empty)} of {store.num_classes} classes have no node: {listed(empty)}; "
                "labels number the classes from 0"
            )
    width = store.feature_dim
    train = store.split["train"]
    nodes = train[train < store.features.shape[0]].numpy()
    cells = COMPARED // labels[:1].numel()
    rows = min(max(cells // width, 256), 1024)
    nodes = torch.from_numpy(np.random.default_rng(0).permutation(nodes)[:rows])
    columns = np.unique(np.linspace(0, width - 1, min(width, cells // rows)).astype(np.int64))
    if len(nodes) < 2:
        return lines
    if len(columns) < width:
        lines.append(f"{len(columns):,} of {width:,} features were compared with the labels")
    x = torch.cat(
        [
            store.features.gather(part)[:, columns].double()
            for part in nodes.split(max(COMPARED // width, 1))
        ]
    )
    if found := telling(x, labels[nodes], width):
        names = store.feature_names or [f"[:, {j}]" for j in range(width)]
        named = listed([names[columns[j]] for j in found])
        of = f"all {len(nodes):,} training nodes"
        if len(nodes) < len(train):
            of = f"{len(nodes):,} training nodes, drawn from {len(train):,}"
        lines.append(
            f"features that alone tell the label of {of}: {named}; leave out what was made from labels"
        )
    return lines


def telling(x, y, width) -> list[int]:
    """Find the columns of x [n, F] each of whose values, a tenth as many as rows at most or as many as classes, occurs
    with one label only of y, [n] or one of [n, C] -> their numbers. Chance would make one among `width` columns so in
    fewer than one of a hundred graphs."""
    found = torch.zeros(x.shape[1], dtype=torch.bool, device="cpu")
    x, order = x.t().sort(1)
    new = x[:, 1:] != x[:, :-1]
    count = 1 + new.sum(1)
    for label in y.reshape(len(y), -1).t():
        sizes = label.unique(return_counts=True)[1].double()
        if len(sizes) < 2:
            continue
        sorted_label = label[order]
        pure = ~((sorted_label[:, 1:] != sorted_label[:, :-1]) & ~new).any(1)
        # ways to label the rows so, and ways to label the values
        ways = torch.lgamma(sizes.sum() + 1) - torch.lgamma(sizes + 1).sum()
        chance = math.log(100 * width) + count * math.log(len(sizes))
        few = count <= max(len(sizes), len(y) // 10)
        found |= pure & few & (chance < ways)
    return found.nonzero()[:, 0].tolist()


def classes_among(values) -> list[int]:
    """List the classes, ascending, among the different labels of graphs, whole numbers: -1 stands for a missing label,
    unless it comes with 1 alone or with other numbers below 0. StoreError for fewer than two."""
    values = sorted(map(int, values))
    if values != [-1, 1] and not (values and values[0] < -1):
        values = [value for value in values if value != -1]
    if len(values) < 2 and not (values and values[0] in (0, 1)):
        actual = f"all labels are {values[0]}" if values else "no graph has a label"
        raise StoreError(f"{actual}: two classes are needed")
    return values if len(values) > 1 else [0, 1]


class GivenEdges(NamedTuple):
    """The edges of a graph in one of two forms: edge_index, or indptr and indices in CSC form."""

    num_nodes: int
    num_edges: int
    edge_index: Any = None  # integers [2, M], row 0 the sources
    indptr: np.ndarray | None = None  # int64 [V + 1]
    indices: Any = None  # integers [M], perhaps `Rows`


def check_graph(edge_index, indptr, indices, num_nodes) -> GivenEdges:
    """Check the shapes and the indptr of a graph in one of two forms."""
    if (edge_index is None) == (indptr is None) or (indptr is None) != (indices is None):
        raise StoreError("give the graph either as edge_index or as indptr and indices")
    if not 1 <= num_nodes <= 1 << 32:
        raise StoreError(f"there are {num_nodes} nodes: a store holds 1 to 2^32")
    if edge_index is not None:
        edge_index = edge_pairs("edge_index", edge_index, num_nodes, num_nodes)
        return GivenEdges(num_nodes, int(edge_index.shape[1]), edge_index)
    indptr = integers("indptr", indptr, num_nodes + 1)
    indices = shaped("indices", array_like("indices", indices), "M")
    refuse(indptr[1:] < indptr[:-1], "indptr", indptr, "the next is smaller, it must not fall")
    count = int(indices.shape[0])
    if indptr[0] != 0 or indptr[-1] != count:
        raise StoreError(f"indptr runs from {indptr[0]} to {indptr[-1]}: not from 0 to {count}")
    return GivenEdges(num_nodes, count, indptr=indptr, indices=indices)


def checked_rows(features, progress):
    """Yield (index of the first row, tensor) of chunks of feature rows, checked for what was announced, NaN and infinity."""
    width = features.shape[1]
    announced = row_dtype("features", features)
    for first, chunk in chunked("features", features, progress=progress):
        chunk = as_rows("features", chunk)
        if chunk.dtype != getattr(torch, announced) or chunk.shape[1:] != (width,):
            raise StoreError(
                f"features has rows of {list(chunk.shape[1:])} {chunk.dtype}"
                f", [{width}] {announced} was announced"
            )
        check_finite("features", chunk, first)
        yield first, chunk.detach().cpu()


def become_codes(features, kept_as) -> bool:
    """Return whether features of floats are kept as codes of 8 bits."""
    return kept_as == "int8" != row_dtype("features", features)


def feature_rows(features, dtype, *, encode, rounded, progress):
    """Yield chunks of feature rows as they are stored, in `dtype`, each checked, or as `encode` makes codes of them unless it
    is None. rounded: `RoundedRows`, which look at them."""
    announced = row_dtype("features", features)
    for first, chunk in checked_rows(features, progress):
        kept = encode(first, chunk) if encode else chunk.to(getattr(torch, dtype))
        if dtype != announced:
            refuse(kept.isinf(), "features", chunk, f"beyond the range of {dtype}", first)
        rounded.add(first, chunk, kept)
        yield as_numpy(kept)


def check_splits(splits, labels, names=None):
    """Check one split of nodes, or a list of K -> {part: int64 ids [n], or [K, n] with rows padded by -1}."""
    if not isinstance(splits, list | tuple):
        return check_split(splits, labels, names=names)
    if not 1 <= len(splits) <= MAX_SPLITS:
        raise StoreError(f"split is a list of {len(splits)}: 1 to {MAX_SPLITS} are possible")
    rows = {name: [] for name in SPLITS}
    for number, split in enumerate(splits):
        try:
            for name, ids in check_split(split, labels, names=names).items():
                rows[name].append(as_rows(name, ids))
        except StoreError as error:
            raise StoreError(f"split {number} of {len(splits)}: {error}") from error
    return {n: pad_sequence(ids, True, padding_value=-1).numpy() for n, ids in rows.items()}


def check_split(split, labels, item="node", names=None):
    """Check {part: ids or mask} -> {part: int64 ids}: in range, disjoint, labelled; of nodes, train is not empty.
    names: of the V nodes, for messages."""
    if not isinstance(split, dict):
        raise StoreError(
            f"split is a {type(split).__name__}: "
            '{"train": ids or mask, "valid": ..., "test": ...}, or a list of such, is needed'
        )
    given = by_part("split", split)
    split = {n: part_ids(f"split {n!r}", given.get(n, ()), len(labels)) for n in SPLITS}
    unlabelled = missing(labels).all(tuple(range(1, labels.ndim)))
    owner = np.full(len(labels), -1, np.int8)
    for part, (name, ids) in enumerate(split.items()):
        inside = (ids >= 0) & (ids < len(labels))
        again = np.ones(len(ids), bool)
        again[np.unique(ids, return_index=True)[1]] = False
        for bad, why in (
            (~inside, f": {item} ids lie in [0, {len(labels)})"),
            (again, " more than once" + "; a mask is of bool" * int(ids.max(initial=0) < 2)),
            (unlabelled[ids * inside], ", which has no label (-1, of targets NaN)"),
        ):
            if bad.any():
                wrong = ids[bad][0]
                wrong = names[wrong] if names and inside.all() else wrong
                raise StoreError(f"split {name!r} holds {item} {wrong}{why}")
        for taken in ids[owner[ids] >= 0]:
            shown = names[taken] if names else taken
            raise StoreError(f"{item} {shown} is in split {SPLITS[owner[taken]]!r} and in {name!r}")
        owner[ids] = part
    if item == "node" and given and not len(split["train"]) and not unlabelled.all():
        raise StoreError("split 'train' is empty: at least one node is needed")
    return split


def drawn_nodes(labels, random):
    """Draw 20 nodes per class for train and 30 for valid; the other nodes with a label are for test; of targets, float [V, T],
    a tenth of the nodes that have any for test and for valid -> {part: int64 ids}."""
    if labels.dtype.kind == "f":
        nodes = np.flatnonzero(~missing(labels).all(1))
        return {part: nodes[ids] for part, ids in drawn_graphs(len(nodes), random).items()}
    if labels.ndim == 2:
        raise StoreError("nodes with several labels each need a split of their own: train_idx, ...")
    order = np.argsort(labels, kind="stable")
    order = order[np.searchsorted(labels[order], 0) :]
    classes = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    parts = zip(*(np.split(random.permutation(nodes), [20, 50]) for nodes in classes))
    train, valid, test = map(np.concatenate, parts)
    return dict(train=train, valid=valid, test=np.sort(test))


def drawn_graphs(count, random):
    """Draw a tenth of `count` graphs for test and a tenth for valid; the others are for train -> {part: ids}."""
    test, rest = np.split(random.permutation(count), [count // 10])
    valid, train = np.split(random.permutation(rest), [count // 10])
    return dict(train=np.sort(train), valid=np.sort(valid), test=np.sort(test))


def check_stored(path, split, labels, item="node", end=1):
    """Raise StoreError unless the split {part: tensor of ids} of the store at `path` is valid, and the labels of its nodes
    lie below `end`; a split without ids is valid."""
    if not any(map(len, split.values())):
        return
    try:
        check_split({name: ids.numpy() for name, ids in split.items()}, labels, item)
    except StoreError as error:
        raise StoreError(f"{path}: {error}: it is damaged; rebuild the store") from error
    for name, ids in split.items():
        part_labels = labels[ids]
        refuse(
            part_labels >= end,
            f"{path}: of split {name!r} labels",
            part_labels,
            f"labels lie in [0, {end}); rebuild the store",
        )


def count_edges(indptr, indices, types=None, node_types=()):
    """Count unusual edges in one pass, EDGE_CHUNK or one neighbour list at a time; lists may be in any order.

    Args:
        indptr: int64 [V + 1]. indices, types: integers [M], perhaps memory-mapped; None without types.
        node_types: as of `_counted_from_one`, empty if they do not matter.

    Returns:
        `duplicates`: edges that repeat another of their type; `self_loops`; `isolated`: nodes without any edge;
        `one_way`: edges without a reverse, among the `one_way_of` edges that were looked up; `from_one`: types of nodes
        whose ids may start at 1.
    """
    num_nodes = len(indptr) - 1
    num_edges = len(indices)
    looked_up = np.arange(num_edges)
    if num_edges > EXACT:
        looked_up = np.sort(np.random.default_rng(0).integers(0, num_edges, SAMPLE))
    dst = np.searchsorted(indptr, looked_up, "right") - 1
    reverses, counts = np.unique(_keys(indices[looked_up], dst, num_nodes), return_counts=True)
    exists = np.zeros(len(reverses), bool)
    touched = indptr[1:] > indptr[:-1]
    first = duplicates = self_loops = 0
    while first < num_nodes:  # neighbour lists of up to EDGE_CHUNK edges in all, or one longer list
        last = int(np.searchsorted(indptr, indptr[first] + EDGE_CHUNK, "right")) - 1
        last = max(last, first + 1)
        src = indices[indptr[first] : indptr[last]]
        dst = np.repeat(np.arange(first, last), np.diff(indptr[first : last + 1]))
        self_loops += int((src == dst).sum())
        touched[src] = True
        keys = _keys(dst, src, num_nodes)
        same = True
        if types is not None:
            kinds = types[indptr[first] : indptr[last]]
            kinds = kinds[np.lexsort([kinds, keys])]
            same = kinds[1:] == kinds[:-1]
        keys = np.sort(keys, kind="stable")  # fast where the lists are sorted
        duplicates += int(((keys[1:] == keys[:-1]) & same).sum())
        low, high = np.searchsorted(reverses, _keys([first, last], 0, num_nodes))
        wanted = reverses[low:high]
        exists[low:high] |= np.searchsorted(keys, wanted, "right") > np.searchsorted(keys, wanted)
        first = last
    return {
        "duplicates": duplicates,
        "self_loops": self_loops,
        "isolated": int((~touched).sum()),
        "from_one": _counted_from_one(~touched, node_types),
        "one_way": int(counts[~exists].sum()),
        "one_way_of": len(looked_up),
    }


def _counted_from_one(isolated, node_types) -> list[str]:
    """Return the types of nodes whose node 0 is isolated although nine of ten nodes, bool [V], are not: their ids may start
    at 1. node_types: (name, nodes, feature width) of each, in the order of their ids."""
    if isolated.sum() > len(node_types) + len(isolated) // 10:
        return []
    lone = []
    first = 0
    for name, count, _ in node_types:
        lone += [name] if isolated[first : first + count][:1].any() else []
        first += count
    return lone


def _keys(rows, columns, count) -> np.ndarray:
    """Pack pairs (row, column < count) into uint64 keys that sort as the pairs do."""
    return np.asarray(rows).astype(np.uint64) * count + np.asarray(columns).astype(np.uint64)


def edge_line(store) -> str:
    """Describe what is unusual about a store's edges in one line; of a store without counts only their number."""
    if (counted := store.meta.get("edges")) is None:
        return f"{store.num_edges:,} edges"
    share = 100 * counted["one_way"] / max(counted["one_way_of"], 1)
    rounded = "over 99" if 99 < share < 100 else "under 1" if share < 1 else f"{share:.0f}"
    words = {
        "duplicates": plural(counted["duplicates"], "duplicate"),
        "self_loops": plural(counted["self_loops"], "self loop"),
        "isolated": plural(counted["isolated"], "isolated node"),
        "one_way": f"{rounded} % without a reverse, messages go one way",
    }
    unusual = ", ".join(text for name, text in words.items() if counted[name])
    every = "every edge"
    if (looked_up := counted["one_way_of"]) < store.num_edges:
        every = f"each of {plural(looked_up, 'edge')} drawn"
    unusual = unusual or f"no duplicates or self loops, {every} has its reverse"
    return f"{store.num_edges:,} edges: {unusual}"
