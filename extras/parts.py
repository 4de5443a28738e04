"""Parts of a store, for machines that each hold a share of the feature rows (train.py --split-features).

    folder = split("graph", 4)                  # graph.parts/part-0 to part-3; python store.py split graph 4
    part = GraphStore.open(folder / "part-1")   # part.features reads its own rows, and refuses the others

meta.json of a part says which one it is, and the checksum of the features of the whole. extras/split.py trains on parts.
"""

from pathlib import Path

import torch

from disk import convert, files
from disk.build import BACKENDS, write_rows
from disk.files import StoreError
from store import GraphStore, StoredFeatures, verify


class PartFeatures(StoredFeatures):
    """The feature rows of a part of a store, by the node ids of the whole: rows `first` to `stop` - 1.

    Attributes:
        shape, dtype: (V, F) of all parts together, torch dtype.
    """

    def __init__(self, rows, first, shape, path):
        self._rows = rows
        self.first = first
        self.stop = first + rows.shape[0]
        self.shape = shape
        self.dtype = rows.dtype
        self.path = path

    def _local(self, ids):
        """Return where rows ids [n] are in this part; StoreError if one is in another part."""
        for node in map(int, ids.aminmax()) if len(ids) else ():
            if not self.first <= node < self.stop:
                raise StoreError(
                    f"{self.path}: the features of node {node} are elsewhere: "
                    f"this part has rows {self.first:,} to {self.stop - 1:,}"
                )
        return ids - self.first

    def read(self, ids, out):
        return self._rows.gather(self._local(ids), out)

    def _put(self, ids, rows):
        self._rows.put_rows(self._local(ids), rows)


def part_bounds(rows, number, of):
    """Return the first row of part `number` of a table cut into `of` parts, and the one after its last."""
    return rows * number // of, rows * (number + 1) // of


def split(path, count, target=None, progress=False) -> Path:
    """Cut a store into `count` stores TARGET/part-0, part-1, ..., for as many machines (train.py --split-features), after
    comparing it with its checksums. All or none of them are there at the end.

    Each has the whole graph, but of the features only its rows, see `part_bounds`. Files that are the same in all of them
    are hard links to those of the store if they are on one file system, and else copies. target: None: PATH.parts.

    Returns TARGET; raises StoreError for a damaged store, one without features or with fewer than `count` rows of them, a
    part, a target that exists, a full disk.
    """
    path = Path(path)
    target = Path(target or f"{path.absolute()}.parts")
    graph = GraphStore.open(path)
    features = getattr(graph.features, "stored", graph.features)
    if graph.part:
        raise StoreError(f"{path} is {described_part(graph)}: split the whole store")
    if not graph.has_features:
        raise StoreError(f"{path} has no features to split")
    if not 2 <= count <= features.shape[0]:
        raise StoreError(
            f"{path} cannot be split into {count}: "
            f"it has {files.plural(features.shape[0], 'row')} of features"
        )
    files.refuse_existing(target)
    if problems := verify(path):
        raise StoreError(f"{path} is damaged: {problems[0]}")
    meta = graph.meta
    file = BACKENDS[meta["backend"]]
    others = meta["files"].keys() - {file}
    with files.complete_or_not_there(target, meta["files"][file]["bytes"]) as building:
        for number in range(count):
            part = building / f"part-{number}"
            part.mkdir()
            for name in others:
                files.link_or_copy(path / name, part / name)
            _write_part(part, graph, features, (number, count), progress)
        if files.read_meta(path) != meta:
            raise StoreError(f"{path} changed while it was split: split it again")
    return target


def _write_part(path, graph, features, part, progress):
    """Write its rows of the features, as they are kept, and the meta.json of a part (number, of how many) of an open store."""
    first, stop = part_bounds(features.shape[0], *part)
    step = convert.chunk_rows(features)
    pieces = (
        convert.as_numpy(features.gather(torch.arange(a, min(a + step, stop))))
        for a in range(first, stop, step)
    )
    rows = convert.Rows((stop - first, features.shape[1]), features.dtype, pieces)
    chunks = (chunk for _, chunk in convert.chunked(path.name, rows, progress=progress))
    file = path / BACKENDS[graph.meta["backend"]]
    whole = graph.meta["files"][file.name]
    # "largest", if it is there, stays that of the whole
    record = whole | write_rows(file, graph.meta, [*rows.shape], chunks)
    meta = graph.meta | {
        "format_version": files.PART_VERSION,
        "part": part,
        "whole": {file.name: whole.get("sha256")},
    }
    files.write_meta(path, meta, {**graph.meta["files"], file.name: record})
    GraphStore.open(path)


def described_part(graph) -> str:
    """Describe the part that an open store is: which of how many, and its feature rows."""
    number, of = graph.part
    first, stop = part_bounds(graph.features.shape[0], number, of)
    return f"part {number} of {of}, with features of nodes {first:,} to {stop - 1:,}"
