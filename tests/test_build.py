"""Tests: stores from molecules and crystals, from tables, from objects of DGL and PyG; store.py build."""

import collections
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from extras import molecules
from extras.graph_store import GraphDataset
from extras.graph_store import verify as verify_graphs
from sources import cli
from sources import prepare as datasets
from sources.prepare import prepare
from store import GraphStore, build_store
from tests.common import HERE, _code, _dgl, _graph, _store
from tests.stores import _cases, _edges, _mask, _molecules, _refuses, _save_npz, _sums

# three cells of copper, with 4, 1 and 2 atoms, and two molecules, with two and three atoms
CRYSTALS = """
{"atom_offsets": [0, 4, 5, 7],
 "Z": [29, 29, 29, 29, 29, 29, 29],
 "frac_coords": [[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0, 0], [0, 0, 0], [0, 0.5, 0.5]],
 "lattice": [[[3.6, 0, 0], [0, 3.6, 0], [0, 0, 3.6]],
             [[2.6, 0, 0], [0, 2.6, 0], [0, 0, 2.6]],
             [[4.0, 0, 0], [0, 4.0, 0], [0, 0, 4.0]]],
 "energy": [-16.0, -4.0, -8.0],
 "train_idx": [0, 1],
 "val_idx": [2]}
"""
MOLECULES = """
{"node_offsets": [0, 2, 5],
 "bond_offsets": [0, 1, 3],
 "bond_index_local": [[0, 0, 0], [1, 1, 2]],
 "atom_feat": [[6], [8], [6], [1], [1]],
 "bond_feat": [[1], [1], [2]],
 "targets": [0.5, 1.5]}
"""
# arrays of these, or parameters of --dataset => what refuses them
REFUSED_GRAPHS = r"""
crystals {"lattice": [[[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[NaN, 0, 0], [0, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]]} => lattice\[1, 0, 0\] is nan
crystals {"lattice": [[[4, 0, 0], [0, 4, 0], [0, 0, 4]], [[1, 0, 0], [0, 1, 0], [0, 1, 0]], [[4, 0, 0], [0, 4, 0], [0, 0, 4]]]} => bad.npz cannot be read: Singular matrix
crystals {"lattice": [[[4, 0, 0], [0, 4, 0], [0, 0, 4]], [[0.1, 0, 0], [0, 0.1, 0], [0, 0, 0.1]], [[4, 0, 0], [0, 4, 0], [0, 0, 4]]]} => images near cell\[1\] is 5\d+.*: .* radius=4
crystals:radius=60 {} => images near cell\[0\] .*at most 16,384 within radius=60 are
crystals:radius=-1 {} => radius=-1.0 is no distance
crystals:radius=inf {} => radius=inf
crystals {"Z": [300, 29, 29, 29, 29, 29, 29]} => Z\[0\] is 300
crystals {"frac_coords": [[NaN, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]} => frac_coords\[0, 0\] is nan
crystals {"frac_coords": [[0, 0, 0], [0, 0, 0]]} => frac_coords has shape \[2, 3\]: \[7, 3\]
crystals {"atom_offsets": [0, 4, 4, 7]} => atom_offsets must rise from 0 to the 7
crystals:row_normalize=1 {} => row_normalize has no effect
molecules {"targets": [1]} => targets has shape \[1\]: \[2\] is needed
molecules {"targets": [[], []]} => targets has shape \[2, 0\]: no graph
molecules {"targets": null} => no array targets or labels
molecules {"targets": [0, 1e300]} => targets\[1, 0\] is inf
molecules {"targets": [0, -Infinity]} => targets\[1, 0\] is -inf
molecules {"targets": null, "labels": [0, 0.5]} => bad.npz: labels\[1, 0\] is 0.5.*: .* fractions are `targets`
molecules {"targets": null, "labels": ["a", "b"]} => labels holds <U1, where numbers are needed
molecules {"bond_index_local": [[99, 0, 0], [1, 1, 2]]} => goes from node .* its graph has
molecules {"node_offsets": [0, 2]} => node_offsets must rise from 0
molecules {"bond_offsets": [0, 3]} => bond_offsets has shape \[2\]: \[3\] is needed
molecules {"bond_feat": [[1], [1]]} => bond_index_local has shape \[2, 3\]: \[2, 2\] is needed
molecules {"train_idx": [1], "val_idx": [1]} => node 1|graph 1 is in split
molecules {"train_idx": [5]} => holds graph 5
molecules {"edge_vector": [[Infinity, 0, 0], [0, 0, 0], [0, 0, 0]]} => edge_vector rows\[0, 0\] is -?inf
molecules {"edge_vector": [[0, 0, 0], [1, 1, 1]]} => bad.npz: edge_vector has shape \[2, \d+\]
"""


def test_periodic_neighbours_are_those_of_a_supercell():
    random = np.random.default_rng(0)
    for radius in (0.5, 1.1, 2.7):
        lattice = np.eye(3) * 1.5 + random.uniform(-0.4, 0.4, (3, 3))
        coords = random.uniform(-2, 2, (5, 3))
        edge_index, vectors = molecules.periodic_neighbours(coords, lattice, radius)
        found = collections.Counter(zip(*edge_index.tolist(), *(-vectors).round(6).tolist()))
        inside, images = coords - np.floor(coords), np.mgrid[-6:7, -6:7, -6:7].reshape(3, -1).T
        apart = (inside[:, None, None] + images - inside[None, :, None]) @ lattice
        apart[range(5), range(5), len(images) // 2] = np.inf  # itself
        close = np.linalg.norm(apart, axis=3) <= radius  # u's image and v, [5, 5, 13^3]
        near = zip(*np.nonzero(close), apart[close].round(6).tolist())
        assert found == collections.Counter((u, v, *far) for u, v, _, far in near), radius


def _prepared(file, folder):
    return GraphDataset.open(prepare(file, folder))


def test_datasets_molecules(tmp_path):
    made = _molecules(tmp_path / "m.npz")
    graphs = _prepared(tmp_path / "m.npz", tmp_path / "d")
    assert [len(ids) for ids in graphs.split.values()] == [32, 4, 4]
    assert sorted(torch.cat(list(graphs.split.values())).tolist()) == list(range(40))
    assert verify_graphs(graphs.path) == []
    for g in range(40):
        graph, (a, b) = graphs.batch([g]), made["bond_offsets"][g : g + 2]
        dst = torch.repeat_interleave(graph.indptr.diff()).tolist()
        found = [(u, v, *e) for u, v, e in zip(graph.indices.tolist(), dst, graph.e.tolist())]
        ends, kinds = made["bond_index_local"][:, a:b].tolist(), made["bond_feat"][a:b].tolist()
        bonds = [(u, v, *e) for u, v, e in zip(*ends, kinds)]
        assert sorted(found) == sorted(bonds + [(v, u, *e) for u, v, *e in bonds])
        assert graph.y[0] == len(graph.x) and graph.edge_vector.shape == (2 * (b - a), 0)
    places = np.random.default_rng(1).random((made["node_offsets"][-1], 3), np.float32)
    first = np.repeat(made["node_offsets"][:-1], np.diff(made["bond_offsets"]))
    u, v = made["bond_index_local"] + first
    _molecules(tmp_path / "v.npz", edge_vector=places[v] - places[u])
    graph = _prepared(tmp_path / "v.npz", tmp_path / "d").batch(range(40))
    dst = torch.repeat_interleave(graph.indptr.diff())
    expected = torch.from_numpy(places)[dst] - torch.from_numpy(places)[graph.indices]
    assert torch.equal(graph.edge_vector, expected)
    split = {"train_idx": range(30), "val_idx": range(30, 33), "test_idx": range(33, 40)}
    _molecules(tmp_path / "s.npz", **split)
    split = _prepared(tmp_path / "s.npz", tmp_path / "d").split
    assert [len(ids) for ids in split.values()] == [30, 3, 7] and split["test"][0] == 33
    _molecules(tmp_path / "few.npz", train_idx=range(4), test_idx=range(4, 40))
    few = "4 graphs to train on, 4 to validate: give val_idx"
    _refuses(few, prepare, tmp_path / "few.npz", tmp_path / "d")


# of two molecules => classes => dtype
ANSWERS = """
{"labels": [-1, 1]} => [-1, 1] => float32
{"labels": [1099511627776, 1099511627777]} => [1099511627776, 1099511627777] => float64
{"targets": [0, 1]} => null => float32
{"targets": [0.5, NaN]} => null => float32
"""


def test_labels_and_targets_of_molecules(tmp_path):
    """What an array is called says what it holds, not its values."""
    made = json.loads(MOLECULES) | {"train_idx": [0], "val_idx": [1]}
    del made["targets"]
    for answers, classes, dtype in _cases(ANSWERS):
        ((name, y),) = json.loads(answers).items()
        np.savez(tmp_path / "y.npz", **made, **{name: y})
        graphs = _prepared(tmp_path / "y.npz", tmp_path / "d")
        assert graphs.labels == (name == "labels") and graphs.classes == json.loads(classes)
        found = graphs.batch([0, 1]).y[:, 0].numpy()
        assert found.dtype == dtype and np.array_equal(found, y, equal_nan=True)


def test_datasets_molecules_and_crystals_that_are_none(tmp_path, capsys):
    given = {"crystals": json.loads(CRYSTALS), "molecules": json.loads(MOLECULES)}
    np.savez(tmp_path / "good.npz", **given["crystals"], forces=np.ones((7, 3)), test_idx=[])
    good = _prepared(tmp_path / "good.npz", tmp_path)
    assert good.batch([0, 1, 2]).y.flatten().tolist() == [-4, -4, -4]
    cell = good.batch([0])  # within 4 angstrom: twelve neighbours and the six behind them
    assert cell.x.tolist() == [[29]] * 4 and cell.indptr.diff().tolist() == [18] * 4
    assert cell.e.flatten().int().bincount().tolist() == [0, 0, 48, 24]
    assert torch.allclose(cell.edge_vector.norm(dim=1, keepdim=True), cell.e)
    assert cell.edge_vector.sum(0).abs().max() < 1e-4  # each bond in both directions
    assert "not used: forces" in capsys.readouterr().out
    assert prepare(tmp_path / "good.npz", tmp_path, seed=7) == good.path
    assert _prepared(f"{tmp_path}/good.npz:radius=3", tmp_path).batch([0]).x.shape == (4, 1)
    for changes, message in _cases(REFUSED_GRAPHS):
        name, changes = changes.split(" ", 1)
        kind = name.partition(":")[0]
        arrays = given[kind] | json.loads(changes)
        np.savez(tmp_path / "bad.npz", **{n: a for n, a in arrays.items() if a is not None})
        name = name.replace(kind, f"{tmp_path}/bad.npz")
        _refuses(message, prepare, name, tmp_path)


def _same(path, reference):
    """Return whether two stores have the same bytes, except in meta.json."""
    return {**_sums(path), "meta.json": 0} == {**_sums(reference), "meta.json": 0}


SPLIT = {"train": np.arange(50), "valid": np.arange(50, 60), "test": np.arange(60, 90)}


def _tables(headers=None, **tables):
    """Write arrays as csv files, some of them with a header."""
    for name, array in tables.items():
        header = (headers or {}).get(name, "")
        np.savetxt(f"{name}.csv", array, "%.9g", ",", header=header, comments="")


# a command of store.py => what it says
REFUSED = r"""
build e.doc h => e.doc cannot be read: No such file
build edges.csv h --features e.csv.gz --labels y.csv => e.csv.gz, line 2: Expected 2 columns, got 1: 3
build edges.csv h --features none.csv --labels y.csv => none.csv cannot be read: No such
build e.csv h --features NOSUCH.csv --labels e.csv => NOSUCH.csv
build NOSUCH.csv h => NOSUCH.csv cannot be read: No such file
build NOSUCH.npz h => NOSUCH.npz cannot be read: No such file
build plain.csv h TABLES --weights 4 => 4 is neither a file nor one of
build plain.csv h TABLES --times T => T is neither a file nor one of .*plain.csv's columns, src, dst
build plain.csv h TABLES --times dst => 'dst' is used for two
build plain.csv h TABLES --weights edges.csv --times 3 => edges.csv has 2 columns for edge_weight: one is
build plain.csv h TABLES --times 3 --weights y.csv => an array \[3000\] is needed, a row for each edge
build own.npz h --weights 3 => edge_weight has no effect on
build own.npz h --features NOSUCH.csv => own.npz: features has no effect on
build own.npz h --seed 3 => seed 3 has no effect: it has a split
build m.npz h --symmetrize => symmetrize has no effect: it holds many small graphs
build m.npz:radius=3 h => radius has no effect: it holds many small graphs
info h --features x => --features is no flag; --help lists them
build own.npz h --featres x => --featres is no flag: did you mean --features.
build own.npz h --sym => --sym is no flag: did you mean --symmetrize.
build own.npz h --edge-time time => --edge-time is no flag: write --times COLUMN
build own.npz h --undirected => --undirected is no flag: write --symmetrize
build nothing.pt h => nothing.pt cannot be read: No such file
build e.csv h => e.csv holds edges alone: features are needed, .* as --features FILE
"""


def test_store_commands_that_cannot_be_meant_are_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = _graph()
    _tables(edges=args["edge_index"].T, x=args["features"], y=args["labels"])
    _tables({"plain": "src,dst,t"}, plain=np.column_stack([*args["edge_index"], np.arange(3000)]))
    _save_npz("own.npz", train_idx=[1, 2])
    _molecules("m.npz")
    Path("e.csv").write_text("0,1\n")
    Path("e.csv.gz").write_bytes(gzip.compress(b"1,2\n3\n"))
    before, rows = sorted(os.listdir()), _cases(REFUSED)
    for path, complaint in (
        (".", r"\. exists already"),
        ("..", r"\.\. exists already"),
        ("x" * 256, "is a name of 256 bytes"),
        ("own.npz/s", "cannot build own.npz/s.*(Not a directory|File exists)"),
    ):
        rows += [(f"build own.npz {path}", complaint)]
        rows += [(f"build edges.csv {path} TABLES", complaint)]
    for words, complaint in rows:
        words = words.replace("TABLES", "--features x.csv --labels y.csv")
        code = _code(words, main=cli.main)
        said = capsys.readouterr().err
        assert code == 2 and re.search(complaint, said), (words, said)
        assert said.count("\n") == 1 or "is no flag" in said
    assert sorted(os.listdir()) == before


# a name of --dataset => what it says
NAMES = """
e.csv => e.csv is no store, .npz or .pt file: python store.py build e.csv my_store
other.csv => ^other.csv cannot be read: No such file
./cora/x => ^./cora/x cannot be read: No such file
g.mtx => g.mtx is a Matrix Market file and no table: docs/data.md
data.pt => ^data.pt cannot be read: No such file or directory$
folder => folder is no store: there is no folder/meta.json
ogbn_arxv => 'ogbn_arxv' is unknown: did you mean ogbn-arxiv. Else give one of synthetic,
Cora:x=1 => cora has no parameter 'x=1': it takes none
Synthetic_MAG:x=1 => synthetic-mag has no parameter 'x=1'
OGBN_papers100m:x=1 => ogbn-papers100M has no parameter 'x=1'
own.npz:nonsense => no parameter 'nonsense': write NAME=VALUE with row_normalize
own.npz:split=1,split=2 => split is given twice
own.npz:split=1.5 => split='1.5' is no int
reddit => synthetic, synthetic-mag, cora.*ogbn-products
synthetic:size=4 => 'size=4'.*nodes, degree
synthetic:nodes=0 => nodes=0
synthetic:train=200000 => train=200000
synthetic:noise=nan => noise
nothing.npz => nothing.npz cannot be read: No such file
"""


def test_dataset_names_that_cannot_be_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _save_npz("own.npz", train_idx=[1, 2])
    Path("folder").mkdir()
    Path("e.csv").write_text("0,1\n")
    Path("g.mtx").write_text("%%MatrixMarket matrix coordinate\n")
    for name, message in _cases(NAMES):
        _refuses(message, prepare, name, "data")
    _refuses("is unknown: give one of", prepare, "z" * 5000, "data")
    assert not list(Path("data").glob("*"))
    _refuses("nodes=0", prepare, "synthetic:nodes=0", Path("deep/root"))
    assert not list(Path("deep/root").glob("*"))
    # a long name is no fault
    assert cli.main(["build", "own.npz", long := "y" * 250]) == 0
    shutil.copy("own.npz", long[:200] + ".npz")
    assert len(prepare(long[:200] + ".npz", "data").name) < 120


def test_store_columns_from_every_source(tmp_path, capsys, monkeypatch):
    """The same store from arrays, .npz, DGL, PyG, and tables with columns by name, number or file, one compressed."""
    monkeypatch.chdir(tmp_path)
    rng, args = np.random.default_rng(1), {**_graph(), "split": SPLIT, "num_classes": None}
    edges, (src, dst) = args["edge_index"], args["edge_index"]
    w, t = rng.integers(1, 9, 3000) / 8, rng.integers(0, 50, 3000)
    e, when = rng.integers(0, 9, (3000, 2)).astype(np.float32), np.arange(200)
    columns = {"edge_weight": w, "edge_time": t, "edge_features": e, "node_time": when}
    changes = dict(symmetrize=True, drop_duplicates=True, drop_self_loops=True, edge_order=True)
    reference = build_store("reference", **args, **changes, **columns)
    own = {"x": args["features"], "y": args["labels"], "edge_index": edges}
    parts = {f"{name}_idx": ids for name, ids in SPLIT.items()}
    other = {"edge_weight": w[:, None], "time": t.astype(float), "edge_attr": e, "node_time": when}
    np.savez("a.npz", **own, **parts, **other)
    np.savez("b.npz", **own, **parts, **columns)
    x, y, w_, t_, e_, when_ = map(torch.from_numpy, (own["x"], own["y"], w, t, e, when))
    graph = _dgl().graph(tuple(torch.from_numpy(edges)), num_nodes=200)
    graph.ndata.update({"feat": x, "label": y, "time": when_})
    graph.edata.update({"weight": w_, "time": t_, "feat": e_})
    data = dict(edge_index=torch.from_numpy(edges), x=x, y=y, time=t_, edge_weight=w_)
    data = types.SimpleNamespace(**data, edge_attr=e_, node_time=when_)
    for number, source in enumerate(("a.npz", "b.npz", graph, data)):
        options = {} if isinstance(source, str) else {"split": SPLIT}
        built = datasets.build(source, f"s{number}", **changes, **options)
        assert _same(built, reference), number
    said = "a.npz: it has edge_weight, edge_time (called time), edge_features (called edge_attr), node_time"
    assert said in capsys.readouterr().out
    named = np.column_stack([e[:, 1], src, dst, t, w, e[:, 0]])
    plain, when = np.column_stack([src, dst, t]), np.stack([when, when], 1)[::-1]
    _tables(x=own["x"], y=own["y"], w=w, e=e, when=when, **SPLIT)
    _tables({"named": "b,src,dst,t,w,a"}, plain=plain, named=named)
    Path("x.csv.gz").write_bytes(gzip.compress(Path("x.csv").read_bytes()))
    words = "--features x.csv.gz --labels y.csv --node-times when.csv".split()
    words += [f"--{name.replace('_', '-')}" for name in changes]
    words += [word for name in SPLIT for word in (f"--{name}", f"{name}.csv")]
    for table, flags in (
        ("plain", "--times 3 --weights w.csv --edge-features e.csv"),
        ("named", "--times t --weights 5 --edge-features a,b"),
    ):
        assert cli.main(["build", f"{table}.csv", f"from-{table}", *words, *flags.split()]) == 0
        assert "drop_duplicates, drop_self_loops, symmetrize" in capsys.readouterr().out
        assert _same(f"from-{table}", reference), table
    words = "build plain.csv s9 --features x.csv --times 3 --node-times y.csv"
    assert cli.main(words.split()) == 0 and not GraphStore.open("s9").labelled


def test_store_ends_at_once_beside_a_thread_that_reads_on(tmp_path):
    """As pyarrow's do with a refused table: they aborted the interpreter's exit."""
    code = "import runpy, sys, threading, time; sys.argv = ['store.py', 'info', 'nosuch']; "
    code += "threading.Thread(target=time.sleep, args=(99,)).start(); "
    code += "runpy.run_path('store.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, timeout=60, capture_output=True)
    assert done.returncode == 2 and b"store.py: nosuch" in done.stderr


def test_store_into_a_closed_pipe_or_a_full_disk(tmp_path, monkeypatch, capsys):
    path = str(_store(tmp_path / "g"))
    reading, writing = os.pipe()
    os.close(reading)
    _save_npz(npz := tmp_path / "g.npz")
    for output, words, code, said in (
        (os.dup(writing), ["build", npz, tmp_path / "b"], 141, ""),
        (writing, ["info", path], 141, ""),
        ("/dev/full", ["info", path], 1, "perhaps that of the output: [Errno 28] No space"),
    ):
        with open(output, "w", buffering=1) as out, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            assert cli.main(map(str, words)) == code
        error = capsys.readouterr().err
        assert said in error and bool(said) == bool(error)
    for script, word in (("store.py", "info"), ("train.py", "--dataset")):
        closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, HERE / script, word, "nosuch"]
        done = subprocess.run(closed, stdout=subprocess.PIPE)
        assert done.returncode == 2 and not done.stdout  # no error in the place of the output


def test_store_build_from_dgl_and_pyg_refuses_what_is_not_used(tmp_path, capsys):
    args = _graph()
    edges, x, y = (torch.from_numpy(args[name]) for name in ("edge_index", "features", "labels"))
    mask = torch.from_numpy(_mask(np.arange(50)))
    masks = {"train_mask": mask, "test_mask": ~mask}
    dgl = _dgl()

    def dgls(formats=None, **edata):
        graph = dgl.graph(tuple(edges), num_nodes=200)
        graph.ndata.update({"feat": x, "label": y, **masks})
        graph.edata.update(edata)
        return graph.formats(formats) if formats else graph

    def pygs(**changes):  # as PyG's Data
        arrays = {"edge_index": edges, "x": x, "y": y, **masks, **changes}
        return types.SimpleNamespace(**{n: a for n, a in arrays.items() if a is not ...})

    order = torch.from_numpy(np.lexsort((edges[0], edges[1])))
    counts = edges[1].bincount(minlength=200)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    ones, sources = torch.ones(3000), edges[0][order]
    # as torch_sparse's SparseTensor
    plain = types.SimpleNamespace(csr=lambda: (indptr, sources, None))
    values = torch.arange(1.0, 3001)
    weighted = types.SimpleNamespace(csr=lambda: (indptr, sources, values))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its sparse tensors a beta
        csr = torch.sparse_csr_tensor(indptr, sources, ones, (200, 200))
    splits = torch.stack([mask, ~mask], 1)
    halves = {"train": np.arange(50), "test": np.arange(50, 200)}
    reference = _store(tmp_path / "reference", num_classes=None, split=halves)
    given = {"features": args["features"], "labels": args["labels"]}
    for number, (source, options) in enumerate(
        (
            (dgls(["csr"]), {}),
            (dgls(rank=ones), {"ignore": ["edata.rank"]}),
            (pygs(edge_index=..., adj_t=plain), {}),
            (pygs(edge_index=None, adj_t=csr), {}),
            (pygs(train_mask=splits.flip(1), test_mask=splits), {"split": 1}),
            (pygs(x=None, y=None), given),
            (pygs(y=y.bfloat16()), {}),
            (pygs(train_mask=splits), {"split": {"train": mask, "test": ~mask}}),
            (pygs(name="a graph", num_nodes=200, pos=x), {}),
        )
    ):
        assert _same(datasets.build(source, tmp_path / str(number), **options), reference), number
    assert "not used: name, pos" in capsys.readouterr().out
    graph = GraphStore.open(datasets.build(pygs(edge_index=..., adj_t=weighted), tmp_path / "w"))
    assert "it has edge_weight\n" in capsys.readouterr().out
    assert torch.equal(graph.indices, sources.int()) and torch.equal(graph.edge_weight, values)
    turned = GraphStore.open(datasets.build(pygs(edge_index=csr), tmp_path / "turned"))
    assert _edges(turned) == sorted(zip(*args["edge_index"][::-1].tolist()))
    bare = pygs(y=None, train_mask=None, test_mask=None)
    assert not GraphStore.open(datasets.build(bare, tmp_path / "bare")).labelled
    few = {"x": x[:150], "y": y[:150], "train_mask": mask[:150]}
    weighted = pygs(edge_index=None, adj_t=weighted, edge_weight=ones)
    for message, source, options in (
        ("edata.rank is not used here", dgls(rank=ones), {}),
        ("adj_t has values other than 1, beside edge_weight", weighted, {}),
        ("num_nodes is 200, and", pygs(edge_index=None, adj_t=plain, **few), {}),
        (r"x has shape \[\]: \[V, F\]", pygs(x=3), {}),
        (r"edge_index has shape \[3000, 2\]: \[2, M\]", pygs(edge_index=edges.T), {}),
        ("no graph is read from a DataFrame", type("DataFrame", (), {})(), {}),
    ):
        _refuses(message, datasets.build, source, tmp_path / "bad", **options)
    assert not (tmp_path / "bad").exists()


def test_saved_data_of_pyg_is_a_graph_and_no_other_pickle_runs(tmp_path, monkeypatch, capsys):
    data = pytest.importorskip("torch_geometric.data")
    monkeypatch.chdir(tmp_path)
    args, names = _graph(), ("features", "edge_index", "labels")
    args = {name: torch.from_numpy(args[name]) for name in names}
    graph = data.Data(x=args["features"], edge_index=args["edge_index"], y=args["labels"])
    torch.save(graph, "g.pt")
    expected = _sums(datasets.build(graph, Path("expected")))
    assert cli.main(["build", "g.pt", "built"]) == 0
    found = prepare("g.pt:ignore=y", "data"), prepare("g.pt", "data"), Path("built")
    assert not GraphStore.open(found[0]).labelled
    for path in found[1:]:
        assert {**_sums(path), "meta.json": expected["meta.json"]} == expected
        assert GraphStore.open(path).meta["source"]["dataset"] == "g.pt"
    typed = data.HeteroData()
    typed["paper"].x, typed["paper", "cites", "paper"].edge_index = graph.x, graph.edge_index
    torch.save(typed, "typed.pt")
    assert GraphStore.open(prepare("typed.pt", "data")).num_nodes == 200
    transforms = pytest.importorskip("torch_geometric.transforms")
    for number, change in enumerate(
        (data.Data.sort, transforms.ToUndirected(), transforms.ToSparseTensor())
    ):
        torch.save(change(graph.clone()), f"{number}.pt")
        assert GraphStore.open(prepare(f"{number}.pt", "data")).num_nodes == 200
    small = [data.Data(x=graph.x[:4], edge_index=torch.tensor([[i], [0]]), y=i) for i in range(4)]
    torch.save(small, "list.pt")
    assert len(_prepared("list.pt", "data")) == 4
    small[2].ran = _Runs()
    torch.save(small, "ran.pt")
    whole = Path("g.pt").read_bytes()
    Path("damaged.pt").write_bytes(whole.replace(graph.x.numpy().tobytes()[:99], bytes(99)))
    Path("cut.pt").write_bytes(whole[:-100])
    torch.save((graph.to_dict(), None), "pair.pt")  # as PyG's own data.pt
    graph.ran = _Runs()
    torch.save(graph, "code.pt")
    for file, said in (
        (
            "code.pt",
            r"code.pt holds more than a PyG Data of tensors .\S+system.; if you trust it, two",
        ),
        ("ran.pt", r"ran.pt holds more than a PyG Data of tensors .\S+system.; if you trust"),
        ("pair.pt", "pair.pt holds a tuple and no PyG Data; if you trust it, two lines of"),
        ("damaged.pt", "damaged.pt cannot be read: .* is damaged"),
        ("cut.pt", "cut.pt cannot be read: File is not a zip file"),
    ):
        _refuses(said, prepare, file, "data")
        _refuses(said, datasets.build, file, "built-of-it")
    assert "ran" not in capsys.readouterr().out
    pair = torch.load("pair.pt", weights_only=False)  # as docs/data.md says
    assert not GraphStore.open(datasets.build(data.Data.from_dict(pair[0]), "pair")).node_types
    monkeypatch.setitem(sys.modules, "torch_geometric.data.data", None)
    _refuses("g.pt cannot be read: .*torch_geometric.data", prepare, "g.pt", "data")


class _Runs:
    def __reduce__(self):
        return os.system, ("echo ran",)


# of the second of two graphs => what refuses it
REFUSED_LIST = r"""
{"edge_attr": null} => edge_attr of graph 1 is there, of others not|edge_attr of graph 1
{"x": [[1, 1, 1], [1, 1, 1], [1, 1, 1]]} => x of graph 1 has shape \[3, 3\]: \[n, 2\]
{"y": [[1, 1], [1, 1], [1, 1]]} => y of graph 1 has shape \[3, 2\]: \[1, 1\]
{"edge_attr": [1, 1, 1, 1, 1, 1, 1, 1, 1]} => edge_attr of graph 1 has shape \[9, 1\]: \[2, 1\]
{"edge_index": [[1.0, 1.0], [1.0, 1.0]]} => edge_index of graph 1 has dtype float32
{"edge_index": [[9, 0], [0, 0]]} => edge 1 goes from node 9 to node 0
{"idx": [3]} => idx is not used here, and may matter: .*ignore=idx
"""


def test_a_list_of_pyg_graphs_is_a_data_set_of_small_graphs(tmp_path, capsys):
    """Edges as they are; y of integers are labels, of floats targets."""
    rng = np.random.default_rng(0)

    def graph(i, **changes):
        n, m = 2 + i % 3, 1 + i % 4
        ends = torch.from_numpy(rng.integers(0, n, (2, m)))
        arrays = {"x": torch.full((n, 2), i), "edge_index": ends, "edge_attr": torch.rand(m)}
        arrays |= {"y": torch.tensor([i % 2]), "smiles": "CC", **changes}
        return types.SimpleNamespace(**{n: a for n, a in arrays.items() if a is not ...})

    def built(graphs, name, **options):
        return GraphDataset.open(datasets.build(graphs, tmp_path / name, **options))

    graphs = [graph(i) for i in range(12)]
    found = built(graphs, "a", split={"train": range(9), "test": [9, 10, 11]})
    said = capsys.readouterr().out
    assert "x holds whole numbers, taken for categories" in said and "not used: smiles" in said
    assert found.classes == [0, 1] and [len(ids) for ids in found.split.values()] == [8, 1, 3]
    for i, given in enumerate(graphs):
        one = found.batch([i])
        ends = one.indices, torch.repeat_interleave(one.indptr.diff()), one.e[:, 0]
        expected = *given.edge_index.tolist(), given.edge_attr.tolist()
        assert sorted(zip(*map(torch.Tensor.tolist, ends))) == sorted(zip(*expected))
        assert one.x.dtype == torch.uint8 and one.x.tolist() == given.x.tolist()
        assert one.y.tolist() == [[i % 2]]
    for name, value, labels in (
        ("float", torch.tensor([[0.5, torch.nan]]), False),
        ("number", 1.5, False),
        ("int", 3, True),
    ):
        found = built(
            [graph(0, y=value, edge_attr=...), graph(1, y=0 * value, edge_attr=...)], name
        )
        assert found.labels is labels and found.batch([0]).y[0, 0] == np.ravel(value)[0]
        assert found.edge_dim == 1 and not found.batch([0, 1]).e.any()
    assert built([graph(0), graph(1)], "given", labels=[7, 9]).classes == [7, 9]
    capsys.readouterr()
    built([graph(0, y=0.0), graph(1, y=1.0)], "said")
    assert "targets of a regression, although all are 0 or 1" in capsys.readouterr().out
    for changes, message in _cases(REFUSED_LIST):
        second = {name: a and torch.tensor(a) for name, a in json.loads(changes).items()}
        _refuses(message, built, [graph(0), graph(1, **second)], "bad")
    _refuses("list: features has no effect on", built, [graph(0), graph(1)], "bad", features=[1])
    _refuses("have no x and no num_nodes: give features", built, [graph(0, x=...)], "bad")
    alike = [graph(i, x=..., num_nodes=2 + i % 3) for i in range(3)]
    assert not built(alike, "alike").batch([0, 2]).x.any()
    assert "list: no x: only edges" in capsys.readouterr().out
    _refuses("no graph is read from a list", built, [types.SimpleNamespace(x=1)], "bad")
