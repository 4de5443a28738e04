"""Splits of nodes and of small graphs: found among arrays, drawn, chosen for a run. K splits of V nodes."""

import numpy as np
import torch

from disk.checks import DRAWN, DRAWN_NODES, drawn_graphs, drawn_nodes
from disk.convert import VALID
from disk.files import SPLITS, StoreError, plural

PARTS = {
    part: [f"{word}_{kind}" for word in words for kind in ("idx", "mask", "masks")]
    for part, words in zip(SPLITS, (["train"], VALID, ["test"]))
}


def found(arrays, count, choice=None):
    """Find the split of `count` nodes or graphs among `Arrays` -> {part: ids}, empty if there is none; of several
    splits the one numbered `choice`, from 0, or with None a list of all.

    Ids are [n], of several splits [K, n], short rows padded with -1. Masks are [count], of several splits
    [K, count] or [count, K], and hold only 0 and 1.
    """
    names = {part: name for part in SPLITS if (name := arrays.find(*PARTS[part]))}
    if names and "train" not in names:
        raise arrays.error(f"it has {' and '.join(names.values())}, but no train_idx to train on")
    rows = {part: _rows(arrays, name, count) for part, name in names.items()}
    counts = sorted({len(splits) for splits in rows.values()} - {1}) or [1]
    if len(counts) > 1:
        raise arrays.error(
            f"it has {' and '.join(map(str, counts))} splits in {', '.join(names.values())}: "
            "the same number is needed"
        )
    if choice is not None and (counts[0] == 1 or not 0 <= choice < counts[0]):
        raise arrays.error(
            f"no split={choice}: it has {plural(counts[0] if names else 0, 'split')}, "
            "and only several are numbered, from 0"
        )

    def ids_of(splits, number):
        row = splits[number % len(splits)]
        if row.dtype == bool:
            return np.flatnonzero(row)
        return row[row != -1] if len(splits) > 1 else row

    numbers = range(counts[0]) if choice is None else [choice]
    taken = [{part: ids_of(r, number) for part, r in rows.items()} for number in numbers]
    return taken if len(taken) > 1 else taken[0]


def _rows(arrays, name, count):
    """Read a part of one split or of K as [K, n]: ids, or bool for masks."""
    values = arrays[name]
    shape = list(values.shape)
    if "mask" not in name and values.dtype != bool:
        if values.ndim == 2 and min(shape) > 1:
            return values
        if values.ndim == 0 or values.size != max(shape):
            raise arrays.error(f"{name} is {shape}: ids are [n], of K splits [K, n]")
        return values.reshape(1, -1)
    ambiguous = shape == [count, count] and count > 1
    if count not in shape or len(shape) > 2 or ambiguous:
        raise arrays.error(f"{name} is {shape}: a mask is [{count}], of K splits [K, {count}]")
    if not ((values == 0) | (values == 1)).all():
        raise arrays.error(f"{name} holds values other than 0 and 1; ids are called ..._idx")
    by_row = shape[-1] == count and len(shape) == 2
    return (values if by_row else values.reshape(count, -1).T).astype(bool)


def graph_split(arrays, count, choice, seed) -> dict:
    """Find the split of small graphs; a missing valid part and, without a split, a test part are drawn, a tenth each."""
    split = found(arrays, count, choice)
    random = np.random.default_rng(seed)
    if isinstance(split, list):
        arrays.say(f"it has {len(split)} splits: split=0, the first, is taken; split=1 is the next")
        split = split[0]
    drawn = f"a tenth of its {count:,} graphs is drawn (seed {seed})"
    if not split:
        arrays.say(f"it has no split: {drawn} for testing, another for validation")
        return drawn_graphs(count, random)
    if "valid" not in split:
        arrays.say(f"it has no validation part: {drawn} from the training part")
        if (n := len(split["train"])) <= count // 10:
            raise arrays.error(f"{n} graphs to train on, {count // 10} to validate: give val_idx")
        split["valid"], split["train"] = np.split(random.permutation(split["train"]), [count // 10])
    return {part: np.sort(ids) for part, ids in split.items()}


def choose_split(graph, number=None, *, seed=0, turn=0, say=lambda line: None):
    """Set the split of an open GraphStore to the one to train with.

    Args:
        number: of one of the graph's splits, from 0; None: `turn` decides.
        seed: for drawing the split of a graph that came without one.
        turn: the number of the run, from 0: runs take the splits in turn, starting over after the last.
        say: prints a line; called with the split that was taken if there was a choice.
    """
    drawn = _is_drawn(graph)
    if number is not None and (drawn or graph.num_splits == 1):
        count = "no" if drawn else "one"
        raise StoreError(f"--split {number} has no effect: {graph.path} has {count} split")
    taken = turn % graph.num_splits if number is None else number
    graph.take_split(split_of(graph, taken, seed))
    if drawn:
        say(f"split   {drawn}, by seed {seed}")
    elif graph.num_splits > 1:
        another = "; --split K takes another" if number is None else ""
        say(f"split   number {taken} of {graph.num_splits}, counted from 0{another}")
    say_empty_parts(graph.split, "nodes", say)


def split_of(graph, number, seed=0) -> dict:
    """Return {part: ids} of a GraphStore's split with this number; by default of its first, or, for a graph that came
    without one, of that which seed 0 draws: the one that choices go by which all --runs have in common."""
    if not _is_drawn(graph):
        return graph.numbered_split(number)
    split = drawn_nodes(graph.labels.numpy(), np.random.default_rng(seed))
    return {part: torch.from_numpy(ids) for part, ids in split.items()}


def _is_drawn(graph) -> str | None:
    """Return how the split of a graph that came without one is drawn, or None."""
    source = graph.meta.get("source")
    # where stores of .npz files had it once
    source_split = source.get("split") if isinstance(source, dict) else None
    drawn = graph.meta.get("split") or source_split
    return drawn if drawn in (DRAWN, DRAWN_NODES) else None


def say_empty_parts(split, things, say):
    """Print which part of a split is empty, and what a run cannot do without it."""
    if not len(split["valid"]):
        say(f"split   it has no valid {things}: no epoch can be chosen by its score")
    if not len(split["test"]):
        say(f"split   it has no test {things}: there will be no test score")
