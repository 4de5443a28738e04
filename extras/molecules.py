"""Molecules and crystals in arrays -> batches of small graphs, as `build_graphs` takes them.

    batches, count, more = molecules(open_npz("esol.npz"))
    batches, count, more = crystals(open_npz("mlearn.npz"), radius=5.0)
    build_graphs("esol", batches, labels=False, split=split, source=more)

G graphs have N nodes and B bonds in all; F columns of node features, D of bond features, T targets.
"""

import numpy as np
import torch

from disk.convert import check_answers, check_finite, refuse, shaped
from extras.graph_store import block_diagonal, build_graphs
from features import prefetch
from sources.splits import graph_split

# graphs of a batch
MOLECULES = 4096
CRYSTALS = 16
# names of arrays: where the edges of graphs begin, features of nodes and of edges, ends of edges
BONDS = ("bond_offsets", "atom_feat", "bond_feat", "bond_index_local")
EDGES = ("edge_offsets", "x", "edge_attr", "edge_index_local")
MOST_CANDIDATES = 1 << 14  # most atoms and periodic images to search for neighbours in a crystal


def build(path, arrays, params, source, *, seed, progress):
    """Build a data set of the molecules or crystals in `Arrays` -> its path. params: of `NPZ`. source: for its meta.json.
    seed: draws a split that is missing."""
    if arrays.find("node_offsets"):
        batches, count, entries = molecules(arrays)
    else:
        batches, count, entries = crystals(arrays, params.get("radius", 4.0))
    split = graph_split(arrays, count, params.get("split"), seed)
    arrays.close()
    return build_graphs(
        path,
        batches,
        labels=arrays.find("labels") is not None,
        split=split,
        source=source | entries,
        progress=progress,
    )


def molecules(arrays):
    """Read molecules, or any graphs in the same layout -> (iterator of `GraphBatch`, G, entries for `source` of the store).

    Args:
        arrays: `Arrays`: `node_offsets` and `bond_offsets` [G+1], `atom_feat` [N, F], `bond_feat` [B, D],
            `bond_index_local` [2, B] (each bond once, atoms numbered from 0 in each graph; the reverse is added),
            `targets` [G] or [G, T], numbers, or `labels`: classes [G], or 0 and 1 [G, T]; see `build_graphs`. Optional:
            `edge_vector` [B, 3] from the first to the second atom of each bond. Or, as of a list of PyG graphs, whose
            edges are kept as they are: `edge_offsets` [G+1], `x` [N, F], `edge_attr` [B, D], `edge_index_local` [2, B].
    """
    ways = 1 if arrays.find("edge_offsets") else 2
    offsets, node_rows, edge_rows, ends = EDGES if ways == 1 else BONDS
    x = arrays.shaped(node_rows, "N", "F")
    e = arrays.shaped(edge_rows, "B", "D")
    ends = arrays.integers(ends, 2, len(e))
    nodes = _offsets(arrays, "node_offsets", len(x), 1)
    bonds = _offsets(arrays, offsets, len(e), 0, len(nodes))
    if ways == 1:
        x = _categories(arrays, node_rows, x)
        e = _categories(arrays, edge_rows, e)
    vectors = None
    if arrays.find("edge_vector"):
        vectors = arrays.shaped("edge_vector", len(e), 3)
    name = arrays.find("targets", "labels", needed=True)
    y = _answers(arrays, name, len(nodes) - 1)
    if ways == 1 and name == "targets" and (np.isnan(y) | (y == 0) | (y == 1)).all():
        arrays.say(
            "y holds floats, targets of a regression, although all are 0 or 1: labels are integers"
        )

    def batch(first):
        last = min(first + MOLECULES, len(y))
        rows = np.repeat(np.arange(bonds[first], bonds[last]), ways)
        edge_index = ends[:, rows]
        if ways == 2:  # each bond, then its reverse
            edge_index[:, 1::2] = edge_index[::-1, 1::2].copy()
        signs = np.resize([1, -1][:ways], (len(rows), 1))
        return block_diagonal(
            num_nodes=np.diff(nodes[first : last + 1]),
            num_edges=ways * np.diff(bonds[first : last + 1]),
            edge_index=edge_index,
            x=x[nodes[first] : nodes[last]],
            e=e[rows],
            y=y[first:last],
            edge_vector=None if vectors is None else signs * vectors[rows],
        )

    batches = map(batch, range(0, len(y), MOLECULES))
    return batches, len(y), {"edges": ["as given", "both directions of each bond"][ways - 1]}


def _categories(arrays, name, values):
    """Return features that are whole numbers from 0 to 255 as uint8, which stands for categories; print that."""
    if values.dtype.kind not in "iu" or values.size and not 0 <= values.min() <= values.max() < 256:
        return values
    if values.dtype != np.uint8:
        arrays.say(f"{name} holds whole numbers, taken for categories: floats are numbers")
    return values.astype(np.uint8)


def crystals(arrays, radius):
    """Read periodic cells, to learn the energy per atom from atomic numbers and distances -> as `molecules` returns.

    Args:
        arrays: `Arrays`: `atom_offsets` [G+1], atomic numbers `Z` [N], `frac_coords` [N, 3], `lattice`
            [G, 3, 3] (rows are vectors, angstrom), `energy` [G] (of the cell).
        radius: cutoff for neighbours, angstrom.
    """
    numbers = arrays.integers("Z", "N")
    offsets = _offsets(arrays, "atom_offsets", len(numbers), 1)
    atoms = np.diff(offsets)
    coords = arrays.shaped("frac_coords", len(numbers), 3).astype(np.float64)
    lattice = arrays.shaped("lattice", len(atoms), 3, 3).astype(np.float64)
    bad = (numbers < 0) | (numbers > 118)
    refuse(bad, f"{arrays.source}: Z", numbers, "atomic numbers lie in [0, 118]")
    for name, values in dict(frac_coords=coords, lattice=lattice).items():
        check_finite(f"{arrays.source}: {name}", torch.from_numpy(values))
    if not 0 < radius < float("inf"):
        raise arrays.error(f"radius={radius} is no distance: a number above 0 is needed")
    candidates = atoms * (1 + 2 * radius / _heights(lattice)).prod(1)
    refuse(
        candidates > MOST_CANDIDATES,
        f"{arrays.source}: the number of atoms and images near cell",
        candidates,
        f"at most {MOST_CANDIDATES:,} within radius={radius:g} are searched; choose a smaller one",
    )
    y = _answers(arrays, "energy", len(atoms), atoms)

    def batch(first, _):
        cells = range(first, min(first + CRYSTALS, len(y)))
        parts = [coords[offsets[i] : offsets[i + 1]] for i in cells]
        pairs = [periodic_neighbours(part, lattice[i], radius) for i, part in zip(cells, parts)]
        edge_index, vectors = (np.concatenate(part, -1) for part in zip(*pairs))
        x = numbers[offsets[first] : offsets[cells[-1] + 1], None]
        return block_diagonal(
            num_nodes=atoms[cells],
            num_edges=[ends.shape[1] for ends, _ in pairs],
            edge_index=edge_index,
            x=x.astype(np.uint8),
            e=np.linalg.norm(vectors, axis=0)[:, None].astype(np.float32),
            y=y[cells],
            edge_vector=vectors.T,
        )

    batches = prefetch(batch, range(0, len(y), CRYSTALS), depth=4, threads=4)
    return batches, len(y), {"radius": radius, "target": "energy per atom"}


def _heights(lattice) -> np.ndarray:
    """Return the distances between opposite faces, [..., 3], of cells [..., 3, 3]."""
    return 1 / np.linalg.norm(np.linalg.inv(lattice), axis=-2)


def periodic_neighbours(coords, lattice, radius):
    """Find the pairs of atoms at most `radius` apart in a periodic crystal of fractional coordinates float64 [n, 3] and
    lattice float64 [3, 3] -> (edge_index int64 [2, E], vectors float64 [3, E] from source to destination). A pair occurs
    once per image within the radius; an atom is its own neighbour only by an image."""
    coords = coords - np.floor(coords)
    reach = radius / _heights(lattice)  # in cells
    images = [np.arange(-n, n + 1) for n in np.ceil(reach).astype(int)]
    images = np.stack(np.meshgrid(*images, indexing="ij"), -1).reshape(-1, 3)
    # [images, n, 3]: near enough to the cell
    apart = np.abs(coords + images[:, None] - 0.5) <= 0.5 + reach + 1e-6
    image, atom = apart.all(2).nonzero()
    place = coords @ lattice
    sources = place[atom] + images[image] @ lattice
    pairs = []
    step = max(1, (1 << 21) // len(coords))
    for a in range(0, len(sources), step):
        part = sources[a : a + step]
        squared = (part**2).sum(1)[:, None] + (place**2).sum(1) - 2 * part @ place.T
        src, dst = (squared <= radius**2 + 1e-6).nonzero()
        pairs.append((src + a, dst))
    src, dst = (np.concatenate(ends) for ends in zip(*pairs))
    vectors = place[dst] - sources[src]
    distance = np.linalg.norm(vectors, axis=1)  # the sum above lost digits
    keep = (distance <= radius) & ((atom[src] != dst) | images[image[src]].any(1))
    return np.stack([atom[src[keep]], dst[keep]]), vectors[keep].T


def _offsets(arrays, name, count, least, length="G+1") -> np.ndarray:
    """Read where each graph's rows begin among `count` -> int64 [G+1]; each graph needs at least `least` rows."""
    offsets = arrays.integers(name, length)
    valid = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == count
    if not valid or (np.diff(offsets) < least).any():
        raise arrays.error(f"{name} must rise from 0 to the {count} rows, by {least} at least")
    return offsets


def _answers(arrays, name, count, atoms=1) -> np.ndarray:
    """Read labels of graphs, or targets, which are divided by their numbers of atoms -> [G, T], float32, or float64 for
    labels that need it."""
    values = arrays[name]
    shaped(f"{arrays.source}: {name}", values, count, *["T"] * (values.ndim > 1))
    if not values.size:
        raise arrays.error(f"{name} has shape {list(values.shape)}: no graph has a target")
    values = (values.reshape(count, -1).T / atoms).T
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and refused
        rounded = values.astype(np.float32)
    if name == "labels" and not np.array_equal(rounded, values, equal_nan=True):
        rounded = values.astype(np.float64)
    check_answers(f"{arrays.source}: {name}", torch.from_numpy(rounded), name == "labels")
    return rounded
