"""Tests: types of edges and of nodes: what is drawn of each, layers, stores, the input of the first layer, training."""

import functools
import importlib
import pickle
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import ddp
import train
from bench.accuracy import read_triples
from extras import relational
from extras.edge_split import split_edges
from extras.relational import NodeInputs, RGATConv, RGCNConv
from extras.types import hops
from inference import inference
from loader import NodeLoader
from model import GNN
from run.adam import Adam
from run.kinds import fanout
from run.run import open_run
from sampler import Block, NeighborSampler
from sources import prepare
from store import GraphStore, build_store, info, verify
from tests.common import (
    DATA,
    OWN_LAYERS,
    OWN_MODELS,
    _code,
    _dgl,
    _run_here,
    _same_for_any_number_of_processes,
    _stops,
)
from tests.stores import _edges_by_type, _refuses, _rewrite_meta
from tests.test_layers import _use, _with_grads, cuda_layers, layers_gpu  # noqa: F401


def _typed_graph(rng, nodes=60, edges=700, types=5):
    """Make a random multigraph -> indptr, indices, edge_type, edge_index of the same edges."""
    dst, kind = rng.integers(0, nodes - 5, edges), rng.integers(0, types, edges)
    order = np.lexsort((kind, dst))
    dst, kind, src = dst[order], kind[order], rng.integers(0, nodes, edges)
    indptr = np.searchsorted(dst, np.arange(nodes + 1))
    arrays = indptr, src.astype(np.int32), kind.astype(np.uint8), np.stack([src, dst])
    return tuple(map(torch.from_numpy, arrays))


@pytest.fixture(scope="module")
def pointing(tmp_path_factory):
    """Edges of type r lead from class y + r to class y: without their types neighbours say nothing."""
    rng, nodes, edges = np.random.default_rng(0), 600, 9000
    label, kind = rng.integers(0, 4, nodes), rng.integers(0, 5, edges)
    dst, class_nodes = rng.integers(0, nodes, edges), [np.flatnonzero(label == c) for c in range(4)]
    src = [rng.choice(class_nodes[c]) for c in (label[dst] + kind) % 4]
    x = rng.standard_normal((nodes, 8)).astype(np.float32)
    x[:, :4] += 1.2 * np.eye(4)[label]
    arrays = {"edge_index": np.stack([src, dst]), "features": x, "labels": label, "edge_type": kind}
    folder = tmp_path_factory.mktemp("typed")
    np.savez(folder / "typed.npz", **arrays)
    arrays |= {"edge_time": rng.integers(0, 100, edges), "node_time": np.full(nodes, 80)}
    np.savez(folder / "timed.npz", **arrays)
    return folder


TYPES_MODEL = """
import torch
from torch import nn

class Net(nn.Module):  # a row for each type of edge, summed up
    def __init__(self, in_dim, num_classes):
        super().__init__()
        self.types, self.linear = nn.Embedding(5, num_classes), nn.Linear(in_dim, num_classes)

    def forward(self, blocks, x):
        block = blocks[-1]
        dst = torch.repeat_interleave(block.indptr.diff())
        rows = self.types(block.edge_type.long())
        return self.linear(x[: block.num_dst]).index_add(0, dst, rows)
"""
FLAGS = "--gpus 0 --fanout 3,3 --hidden 16 --batch-size 50 --lr 0.02 --dropout 0"


def test_one_fanout_for_all_types_draws_as_if_there_were_none():
    indptr, indices, kinds, _ = _typed_graph(np.random.default_rng(6))
    plain = NeighborSampler(indptr, indices, [10], edge_ids=True)
    typed = NeighborSampler(indptr, indices, [10], edge_type=kinds, by_type=False)
    (block,), (expected,) = (s.sample(torch.arange(60), 0) for s in (typed, plain))
    assert torch.equal(block.indices, expected.indices) and block.edge_ids is None
    assert torch.equal(block.edge_type, kinds[expected.edge_ids])


TWO_HEADS = functools.partial(RGATConv, heads=2)


@pytest.mark.parametrize("conv, bases", [(RGCNConv, 2), (RGATConv, 0), (TWO_HEADS, 2)])
def test_layers_of_many_types_on_a_gpu_are_those_of_the_cpu(conv, bases, cuda_layers, monkeypatch):  # noqa: F811
    """With padding: destinations without edges, and edges without destinations."""
    monkeypatch.setattr(relational, "LOOPED", 2)
    indptr, indices, kind, _ = _typed_graph(np.random.default_rng(5))
    (block,) = NeighborSampler(indptr, indices, [3], edge_type=kind).sample(torch.arange(20), 0)
    layer, h = conv(9, 8, 5, bases), torch.randn(block.num_src + 3, 9)
    padded = block._replace(
        indptr=F.pad(block.indptr, (0, 2), value=block.num_edges),
        indices=F.pad(block.indices, (0, 7), value=-1),
        src_nodes=torch.arange(len(h)),
        edge_type=F.pad(block.edge_type, (0, 7), value=4),
    )
    weight, parameters = torch.randn(20, 8), [*layer.parameters()]

    def compute(block):
        rows = h[: block.num_src]
        return _with_grads(lambda h, *_: layer(block, h)[:20], weight, rows, *parameters)

    on_cpu = compute(block)
    _use(layers_gpu, monkeypatch)
    result, to_h, *grads = compute(padded)
    assert not to_h[-3:].any()
    torch.testing.assert_close([result, to_h[:-3], *grads], on_cpu)


def test_rgcn_of_no_destination_and_of_unknown_types():
    indptr, indices, kind, _ = _typed_graph(np.random.default_rng(5))
    s = NeighborSampler(indptr, indices, [3, 3], edge_type=kind)
    blocks, none = s.sample(torch.arange(20), 0), s.sample(torch.arange(0), 0)
    x = torch.zeros(60, 9)
    for bases in (0, 2):
        for conv in ("rgcn", "rgat"):
            make = functools.partial(GNN, 9, 8, 3, conv=conv, bases=bases, num_layers=2, heads=2)
            net = make(num_types=5)
            assert net(none, x[:0]).shape == (0, 3)
        few, rows, said = make(num_types=3), x[: blocks[0].num_src], "the layer knows 0 to 2"
        _refuses(f"types 0 to 4, {said}", few, blocks, rows, error=IndexError)
        _refuses(said, inference, few, indptr, indices, x, types=kind, error=IndexError)
        bare = [block._replace(edge_type=None) for block in blocks]
        _refuses("blocks have no edge_type", net, bare, rows, error=ValueError)


def test_stores_with_types_are_checked(tmp_path):
    indptr, indices, kind, ends = _typed_graph(np.random.default_rng(4))
    graph = {"features": np.zeros((60, 2)), "labels": np.zeros(60, int), "split": {"train": [0]}}
    build = functools.partial(build_store, **graph)
    path = build(tmp_path / "csc", indptr=indptr, indices=indices, edge_type=kind)
    there = GraphStore.open(path)
    assert torch.equal(there.edge_type, kind)
    rows = torch.repeat_interleave(indptr.diff())  # sources of a type are in ascending order
    assert torch.equal(there.indices, indices[np.lexsort([indices, kind, rows])])
    assert there.num_edge_types == 5 and "5 types" in info(path)
    for said, bad in (
        ("edge_type.0. is -1: numbers of types lie in .0, 32768.", kind.long() - 1),
        ("edge_type is a Tensor .3.: an array .700.", kind[:3]),
    ):
        _refuses(said, build, tmp_path / "a", edge_index=ends, edge_type=bad)


@pytest.mark.parametrize("name, least", [("rgcn", 0.9), ("rgat --heads 2", 0.9), ("sage", 0)])
def test_train_learns_from_the_types_of_edges(name, least, pointing, tmp_path, capsys):
    """Also resumes, predicts, and prints how it uses them; sage cannot tell the classes apart."""
    log, _ = _run_here(
        tmp_path, f"--dataset {pointing}/typed.npz --model {name} {FLAGS} --epochs 12"
    )
    line = "edges have 5 types; --fanout is for each of them, and the model sees them"
    blind = "types of edges are not used by --model sage: rgcn and rgat take them"
    assert (line if least else blind) in capsys.readouterr().out
    accuracy = log[-1]["exact"]["test"]
    assert accuracy > least and (least or accuracy < 0.6)
    again = f"--resume {tmp_path}/here.pt --predict {tmp_path}/p.npy --gpus 0 --root {tmp_path}"
    arrays = dict(np.load(pointing / "typed.npz"))
    few = arrays["edge_type"] < 4  # the graph to predict lacks a type
    arrays |= {"edge_index": arrays["edge_index"][:, few], "edge_type": arrays["edge_type"][few]}
    np.savez(tmp_path / "few.npz", **arrays)
    assert _code(again, f"--dataset {tmp_path}/few.npz") == 0
    assert (np.load(tmp_path / "p.npy") == arrays["labels"]).mean() > least - 0.1


def test_types_with_times_in_a_window(pointing, tmp_path, capsys):
    words = f"--dataset {pointing}/timed.npz --root {tmp_path} {FLAGS} --epochs 2 --model"
    assert _code(words, "rgcn --window 30") == 0
    said = "at their own time or before it, of the last 30, in every hop"
    assert said in capsys.readouterr().out
    arrays = dict(np.load(pointing / "timed.npz"))
    arrays["edge_time"] += 1_600_000_000
    arrays["node_time"] += 1_600_000_000
    arrays["edge_time"][arrays["edge_type"] == 1] *= 1000
    np.savez(tmp_path / "units.npz", **arrays)
    units = "times of edges 1 are .* milliseconds since 1970, the second .* seconds"
    for more, complaint in (
        ("rgcn --fanout any=3,3", "--fanout any= draws from all types together, and"),
        ("sage", "lists are by type, then time, and --model sage sees no types"),
        (f"rgcn --dataset {tmp_path}/units.npz", units),
    ):
        _stops(capsys, complaint, words, more)


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")
def test_aifb_is_read_as_its_paper_counts_it():
    graph = read_triples(DATA)
    assert len(graph["labels"]) == 8285 and graph["edge_index"].shape == (2, 2 * 29043)
    assert graph["edge_type"].max() + 1 == 2 * 45 and set(graph["labels"]) == {-1, 0, 1, 2, 3}
    assert [len(graph[f"{part}_idx"]) for part in ("train", "test")] == [140, 36]


COUNTS = {"author": 30, "paper": 50, "place": 7}
ENDS = ("author", "writes", "paper"), ("author", "at", "place"), ("paper", "cites", "paper")


def _typed():
    rng = np.random.default_rng(0)
    edges = {k: rng.integers(0, [[COUNTS[k[0]]], [COUNTS[k[2]]]], (2, 90)) for k in ENDS}
    x = {"paper": rng.random((50, 8), np.float32), "place": rng.random((7, 3)).astype(np.float16)}
    ids = rng.permutation(50)
    return {
        "node_types": COUNTS,
        "edge_index": edges,
        "features": x | {"author": None},
        "labels": {"paper": rng.integers(0, 3, 50)},
        "split": {"train": ids[:20], "valid": np.isin(np.arange(50), ids[20:35])},
    }


def _npz(file, **changes):
    """Write the graph of `_typed` to a file, without the features of places; None leaves an array out."""
    given = _typed()
    arrays = {f"edge_index:{','.join(k)}": e for k, e in given["edge_index"].items()}
    arrays |= {"x:paper": given["features"]["paper"], "y:paper": given["labels"]["paper"]}
    arrays |= {"num_nodes:author": 30, "num_nodes:place": 7} | changes
    np.savez(file, **{name: values for name, values in arrays.items() if values is not None})
    return file


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_a_typed_store_has_the_graph_of_each_type(backend, tmp_path):
    given, rng = _wide(), np.random.default_rng(1)
    wide = given.pop("edge_features")
    more = {"edge_weight": {k: rng.random(90).astype(np.float32) for k in ENDS}}
    more["edge_time"] = {k: rng.integers(0, 99, 90) for k in ENDS}
    times = {"paper": rng.integers(0, 50, 50)}
    options = {"symmetrize": True, "backend": backend, "edge_order": True, "node_time": times}
    path = build_store(tmp_path / "g", **given, **more, edge_features=wide, **options)
    graph = GraphStore.open(path)
    assert verify(path) == [] and "50 paper (8 features), 7 place" in info(path)
    assert graph.node_types == {"paper": (50, 8), "place": (7, 3), "author": (30, 0)}
    names = ["author,writes,paper", "author,at,place", "paper,cites,paper"]
    assert graph.edge_types == [*names, "paper,rev_writes,author", "place,rev_at,author"]
    first, wanted = {"paper": 0, "place": 50, "author": 57}, {}
    for i, ((a, name, b), (src, dst)) in enumerate(given["edge_index"].items()):
        rows = np.zeros((90, 4), np.float32)  # narrower ones get zeros
        rows[:, : 1 if i == 0 else i + 2] = wide[a, name, b].reshape(90, -1)
        columns = (more[column][a, name, b] for column in ("edge_weight", "edge_time"))
        columns = *columns, rows.tolist(), range(90 * i, 90 * i + 90)
        forth = [*zip(src + first[a], dst + first[b], *columns)]
        back = [(v, u, *rest) for u, v, *rest in forth]
        wanted[f"{a},{name},{b}"] = sorted(forth + back * (a == b))
        wanted |= {f"{b},rev_{name},{a}": sorted(back)} if a != b else {}
    assert _edges_by_type(graph, *more, "edge_features", "edge_order") == wanted
    assert graph.given_edges(graph.stored_edges([7, 200])).tolist() == [7, 7, 200, 200]
    features = np.zeros((57, 8), np.float32)
    features[:50] = given["features"]["paper"]
    features[50:, :3] = given["features"]["place"]
    assert graph.features.gather(torch.arange(57)).tolist() == features.tolist()
    assert graph.labels.tolist() == given["labels"]["paper"].tolist() + [-1] * 37
    assert graph.split["train"].tolist() == given["split"]["train"].tolist()
    assert graph.split["valid"].tolist() == np.flatnonzero(given["split"]["valid"]).tolist()
    assert (graph.node_time[50:] == graph.node_time[:50].max()).all()
    empty_first, below_0 = [["a", 7, 0], ["b", 80, 8]], [["a", -1, 1], ["b", 88, 1]]
    other_rows = [empty_first, below_0, [["paper", 50, 8]], [["a", 87, 9]]]
    for wrong in (5, [["a", "b", []]], *other_rows * (backend == "mmap")):
        _rewrite_meta(path, **(graph.meta | {"node_types": wrong}))
        _refuses("cannot be read", GraphStore.open, path)


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_each_type_of_nodes_has_a_scale_of_its_own_in_int8(backend, tmp_path, capsys):
    """Counts of places beside papers in [0, 1]: no type has codes of another's range; one scale of all still opens."""
    given = _typed()
    x = given["features"]
    x["place"] = np.arange(21, dtype=np.float32).reshape(7, 3) * 1000
    path = build_store(tmp_path / "g", **given, feature_dtype="int8", backend=backend)
    graph = GraphStore.open(path)
    assert "few different values" not in capsys.readouterr().out
    rows = graph.features[:]
    true = torch.zeros(57, 8)
    for name, part in (("paper", slice(0, 50)), ("place", slice(50, 57))):
        typed = torch.from_numpy(x[name])
        true[part, : typed.shape[1]] = typed
        step = (true[part].amax(0) - true[part].amin(0)) / 255
        assert ((rows[part] - true[part]).abs() <= 0.501 * step).all()
    assert not rows[50:, 3:].any() and torch.equal(
        pickle.loads(pickle.dumps(graph)).features[:], rows
    )
    words = "--fanout 3,3 --hidden 8 --dropout 0 --gpus 0 --prefetch 0 --model rgcn"
    found = []
    for cache in ("", "--cache 200", "--cache 1MB"):
        flags = train.parse_args(f"{words} {cache} --dataset {path}".split())
        run = open_run(ddp.Ranks(), flags, path)
        (batch,) = run.loader(run.store.split["train"])
        nodes = batch.blocks[0].src_nodes.long()
        assert torch.equal(batch.x, rows[nodes[nodes < 57]])
        found.append((run.forward(batch), run.exact()))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    if backend == "lmdb":
        graph.features.put_rows(torch.tensor([50]), rows[51:52])
        why = "rows.0, 0. is 1.0.*e.30: its column was built for 0 to 18000"
        _refuses(why, graph.features.put_rows, torch.tensor([50]), torch.full((1, 8), 1e30))
    x["place"][0, 0] = 1e9
    build_store(tmp_path / "far", **given, feature_dtype="int8")
    assert "left of 1 column, 0 of place (2 of 7), in 57 rows" in capsys.readouterr().out
    one = graph.features.scale[1].tolist()
    _rewrite_meta(path, **(graph.meta | {"feature_scale": one}))
    old = GraphStore.open(path).features
    assert old.ends is None and torch.equal(old[50:], graph.features[50:])


def test_by_type_an_edge_without_a_time_has_that_of_its_source(tmp_path, capsys):
    """Edges of places, which have no times, are always seen; one type of edges has times of its own."""
    rng, writes = np.random.default_rng(2), ENDS[0]
    times = {"paper": rng.integers(0, 50, 50), "author": rng.integers(0, 50, 30)}
    own = rng.integers(-9, 50, 90).astype(np.float32)
    given = _typed() | {"node_time": times, "edge_time": {writes: own}}
    graph = GraphStore.open(build_store(tmp_path / "g", **given, symmetrize=True))
    known, first = times | {"place": [-(2**63)] * 7}, {"paper": 0, "place": 50, "author": 57}
    wanted = {}
    for (a, name, b), (src, dst) in given["edge_index"].items():
        kind, back = f"{a},{name},{b}", f"{b},rev_{name},{a}" if a != b else f"{a},{name},{b}"
        for u, v, t in zip(src.tolist(), dst.tolist(), own.astype(int).tolist()):
            for of, (i, x), (j, y) in ((kind, (a, u), (b, v)), (back, (b, v), (a, u))):
                edge = first[i] + x, first[j] + y, t if name == "writes" else int(known[i][x])
                wanted.setdefault(of, []).append(edge)
    assert _edges_by_type(graph, "edge_time") == {of: sorted(e) for of, e in wanted.items()}
    assert re.search(r"time -inf to \d+, nodes' time \d+ to", info(graph.path))
    arrays = {f"node_time:{kind}": values for kind, values in times.items()}
    arrays["edge_time:author,writes,paper"] = own
    prepare.build(_npz(tmp_path / "a.npz", **arrays), tmp_path / "n")
    printed = capsys.readouterr().out
    assert "edges of author,at,place; paper,cites,paper" in printed
    assert "each gets that of its source" in printed
    assert "nodes of place have no times: they see all edges" in printed


def test_npz_pyg_and_dgl_give_the_same_store(tmp_path, capsys):
    """Also of edge features of several widths."""
    given = _wide()
    del given["features"]["place"]
    paper = {"x": given["features"]["paper"], "y": given["labels"]["paper"], "time": np.arange(50)}
    paper["train_mask"] = np.isin(np.arange(50), given["split"]["train"])
    paper["val_mask"] = given["split"]["valid"]
    tensors = {name: torch.from_numpy(values) for name, values in paper.items()}
    in_file = {f"{name}:paper": values for name, values in paper.items()}
    values = given["edge_features"].items()
    in_file |= {f"edge_features:{','.join(kind)}": rows for kind, rows in values}
    csr = {"x:paper": None, "feat_indices:paper": np.tile(np.arange(8), 50)}
    csr |= {"feat_indptr:paper": np.arange(0, 401, 8), "feat_data:paper": paper["x"].ravel()}
    dgl, pyg = _dgl(), pytest.importorskip("torch_geometric.data").HeteroData()
    sources = {"pyg": pyg, "npz": _npz(tmp_path / "typed.npz", **in_file)}
    sources["csr"] = _npz(tmp_path / "csr.npz", **in_file | csr)
    sources["dgl"] = dgl.heterograph({k: tuple(e) for k, e in given["edge_index"].items()}, COUNTS)
    in_dgl = {"x": "feat", "y": "label"}
    data = {in_dgl.get(name, name): values for name, values in tensors.items()}
    sources["dgl"].nodes["paper"].data.update(data)
    pyg["paper"].update(tensors)
    pyg["author"].num_nodes, pyg["place"].num_nodes = 30, 7
    for kind, edges in given["edge_index"].items():
        pyg[kind].edge_index = torch.from_numpy(edges)
        rows = torch.from_numpy(given["edge_features"][kind])
        pyg[kind].edge_attr = sources["dgl"].edges[kind].data["feat"] = rows
    pyg.train_idx = torch.arange(5)
    _refuses("train_idx has no type", prepare.build, pyg, tmp_path / "no")
    del pyg.train_idx
    given["node_time"] = {"paper": paper["time"]}
    reference = GraphStore.open(build_store(tmp_path / "g", **given, drop_duplicates=True))
    s = NeighborSampler(reference.indptr, reference.indices, [3], edge_type=reference.edge_type)
    (block,) = s.sample(torch.arange(80), 0)
    assert torch.equal(block.to_dgl().edata[dgl.ETYPE], block.edge_type.long())
    for name, source in sources.items():
        graph = GraphStore.open(prepare.build(source, tmp_path / name, drop_duplicates=True))
        assert graph.node_types == {"paper": (50, 8), "author": (30, 0), "place": (7, 0)}
        assert graph.node_types == reference.node_types
        line = "edge_features have 1 or 3 or 4 columns, by type: narrower ones get zeros"
        assert line in capsys.readouterr().out
        columns = "edge_time", "edge_features"
        assert _edges_by_type(graph, *columns) == _edges_by_type(reference, *columns)
        assert torch.equal(graph.labels, reference.labels)
        assert torch.equal(graph.node_time, reference.node_time)
        assert torch.equal(graph.features.tensor, reference.features.tensor)
        for part in ("train", "valid"):
            assert set(graph.split[part].tolist()) == set(reference.split[part].tolist())


def test_arrays_in_place_of_those_of_the_only_type_of_nodes(tmp_path):
    ends, given = torch.arange(9), {"features": np.eye(9, 2), "labels": np.arange(9) % 2}
    two = _dgl().heterograph({("n", name, "n"): (ends, ends) for name in "ab"})
    two.ndata["feat"] = torch.zeros(9, 4)
    graph = GraphStore.open(prepare.build(two, tmp_path / "g", **given, split={"train": [3]}))
    assert graph.features.tensor.tolist() == given["features"].tolist()
    assert graph.labels.tolist() == given["labels"].tolist() and graph.num_edge_types == 2
    assert graph.split["train"].tolist() == [3]


def test_hgt_of_the_documentation_is_pygs(tmp_path, monkeypatch):
    nn = pytest.importorskip("torch_geometric.nn")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "myhgt.py").write_text(OWN_MODELS["myhgt.py"])
    kinds, starts = [("a", "r", "b"), ("b", "s", "a"), ("a", "t", "a")], {"a": 0, "b": 30}
    ours = importlib.import_module("myhgt").HGTConv(16, 4, [30, 50], 3)
    theirs, x = nn.HGTConv(16, 16, (["a", "b"], kinds), heads=4), torch.randn(50, 16)
    edges = {(u, r, v): torch.stack([torch.randint(20, (60,)) for _ in "uv"]) for u, r, v in kinds}
    ends = [pairs + torch.tensor([[starts[u]], [starts[v]]]) for (u, _, v), pairs in edges.items()]
    src, dst = torch.cat(ends, 1)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(torch.zeros_like(p) if "bias" in name else torch.randn(p.shape) / 4)
        for t, name in enumerate("ab"):
            key, query, value = theirs.kqv_lin.lins[name].weight.chunk(3)
            matrices = {"key": key, "query": query, "value": value}
            for of, weight in {**matrices, "out": theirs.out_lin.lins[name].weight}.items():
                ours.node_maps[of][t] = weight.t()
            ours.skip[t] = theirs.skip[name]
        for of, rel in (("attend", theirs.k_rel), ("send", theirs.v_rel)):
            ours.edge_maps[of].copy_(rel.weight.view(4, 3, 4, 4).transpose(0, 1))
        ours.prior.copy_(torch.cat([theirs.p_rel["__".join(kind)] for kind in kinds]))
    kind = torch.arange(3).repeat_interleave(60)
    order = torch.from_numpy(np.lexsort((kind, dst)))
    indptr = torch.bincount(dst + 1, minlength=51).cumsum(0)
    block = Block(indptr, src[order], torch.arange(50), None, None, kind[order])
    found = theirs({"a": x[:30], "b": x[30:]}, edges)
    torch.testing.assert_close(ours(block, x), torch.cat([found["a"], found["b"]]))


REFUSED_FILES = [  # what is said, changes of the arrays of a file
    ("join author: sizes are given of paper, place alone", {"num_nodes:author": None}),
    ("t.npz: paper: num_nodes is 7, and there are 50 labels or features", {"num_nodes:paper": 7}),
    (r"ids of author lie in \[0, 30\)", {"edge_index:author,writes,paper": np.full((2, 1), 60)}),
    (r"has shape \[3, 2\]: \[2, M\]", {"edge_index:author,writes,paper": np.zeros((3, 2), int)}),
    ("labels of paper, author: keep those of one, as target=", {"y:author": [0] * 30}),
    ("edge_weight: give it for all types of", {"edge_weight:author,writes,paper": np.ones(90)}),
    ("labels has no type", {"labels": np.zeros(50)}),
    ("train_idx:author is not used here.* ignore=train_idx:a", {"train_idx:author": [0]}),
]


def test_reverses_that_are_there_are_not_added(tmp_path):
    """As ToUndirected of PyG names them; the other types get theirs."""
    given, more = _typed(), {}
    for a, name, b in ENDS[1:]:
        more[b, f"rev_{name}", a] = given["edge_index"][a, name, b][::-1, ::-1]
    given["edge_index"] |= more
    graph = GraphStore.open(build_store(tmp_path / "g", **given, symmetrize=True))
    added = "paper,rev_writes,author"
    assert graph.edge_types == [*map(",".join, given["edge_index"]), added]
    assert graph.num_edges == 90 * 6


def _reverse(start):
    """Return a graph with one more edge type, named like a reverse, and --symmetrize."""
    edges = dict.fromkeys(ENDS, [[0], [0]])
    edges[start, "rev_at", "author"] = [[1], [0]]
    return {"edge_index": edges, "symmetrize": True}


EMPTY = {"node_types": dict.fromkeys(COUNTS, 0), "features": {}, "labels": None, "split": None}
EMPTY |= {"edge_index": dict.fromkeys(ENDS, [[], []])}
# of one type whole numbers that the floats of the others cannot hold
ROUNDED = {kind: np.zeros(90, np.float16) for kind in ENDS} | {ENDS[0]: np.full(90, 2049)}
COARSE = {"author": np.full((30, 1), 2049), "paper": np.ones((50, 1), np.float16)}
REFUSED_GRAPHS = [  # what is said, changes of the arguments of build_store
    ("edge_type is not for a graph that is given by type", {"edge_type": [0]}),
    ("features: \\{type: values\\} is needed", {"features": np.zeros((87, 2))}),
    ("features of book: types of nodes are author", {"features": {"book": np.zeros((1, 2))}}),
    (r"features of author\[0, 0\] is 2049: .*rounds it: give them", {"features": COARSE}),
    ("the type 0 has no name", {"node_types": {**COUNTS, 0: 3}}),
    (r"paper has shape \[49, 2\]: \[50, F\]", {"features": {"paper": np.zeros((49, 2))}}),
    ("of author have no columns: leave them", {"features": {"author": np.zeros((30, 0))}}),
    (r"labels of paper has shape \[49\]: \[50\] is needed", {"labels": {"paper": [0] * 49}}),
    ("paper and author have labels", {"labels": {"paper": [0] * 50, "author": [0] * 30}}),
    ("node_types has dtype float64", {"node_types": {**COUNTS, "paper": 50.5}}),
    (r"node_types\[3\] is -1: a number of nodes is 0 or more", {"node_types": {**COUNTS, "x": -1}}),
    ("edges 'writes': .source type, name, dest", {"edge_index": {"writes": [[0], [0]]}}),
    ("node_types is for a graph that is given by type", {"edge_index": np.zeros((2, 3), int)}),
    ("node 50, which has no label", {"split": {"train": [50]}}),
    (r",writes,paper has shape \[91\]: \[90\]", {"edge_weight": {k: np.ones(91) for k in ENDS}}),
    ("has no name: printable text", {"node_types": {**COUNTS, "a\x1b": 3}}),
    ("the type 'a,b' has no name", {"edge_index": {("author", "a,b", "paper"): [[0], [0]]}}),
    (
        r"node_time of paper\[0\] is nan: a missing time",
        {"node_time": {"paper": np.full(50, np.nan)}},
    ),
    (r"edge_weight of \w+,\w+,\w+\[0\] is 2049: .*float16, .*rounds", {"edge_weight": ROUNDED}),
    ("split is of nodes with labels, and no type of nodes has any", {"labels": None}),
    (
        "edges place,rev_at,author are not the reverses of author,at,place: rename",
        _reverse("place"),
    ),
    ("there are 0 nodes", EMPTY),
]


def test_typed_graphs_and_typed_files_refuse(tmp_path):
    for said, change in REFUSED_GRAPHS:
        _refuses(said, build_store, tmp_path / "g", **{**_typed(), **change})
    for said, change in REFUSED_FILES:
        _refuses(said, prepare.build, _npz(tmp_path / "t.npz", **change), tmp_path / "g")
    assert not (tmp_path / "g").exists()


def _wide():
    """Return the graph of `_typed` with edge features of several widths."""
    rng = np.random.default_rng(1)
    values = {kind: rng.random((90, 2 + i), np.float32) for i, kind in enumerate(ENDS)}
    return _typed() | {"edge_features": values | {ENDS[0]: values[ENDS[0]][:, 0]}}


def test_typed_graphs_keep_what_is_narrow(tmp_path):
    """uint8 split ids though the labelled type begins at node 300, bfloat16 edge features, no edges at all."""
    nodes = {"user": 300, "item": 5}
    graph = dict(features={n: np.ones((count, 2)) for n, count in nodes.items()}, node_types=nodes)
    graph |= dict(labels={"item": [0, 1, 0, 1, 0]}, split={"train": np.array([0, 1], np.uint8)})
    values = {("user", "buys", "item"): torch.tensor([[1.5]], dtype=torch.bfloat16)}
    edges = {("user", "buys", "item"): [[7], [1]]}
    more = {"edge_index": edges, "edge_features": values, "symmetrize": True}
    stored = GraphStore.open(made := build_store(tmp_path / "a", **more, **graph))
    assert stored.split["train"].tolist() == [300, 301] and verify(made) == []
    assert stored.edge_features.tolist() == [[1.5], [1.5]]
    _refuses("there are no types of edges", build_store, tmp_path / "b", edge_index={}, **graph)
    made = build_store(tmp_path / "b", edge_index={("user", "buys", "item"): [[], []]}, **graph)
    assert GraphStore.open(made).num_edges == 0
    reversed_ = GraphStore.open(build_store(tmp_path / "d", **{**_typed(), **_reverse("paper")}))
    assert len(reversed_.edge_types) == 7
    _npz(tmp_path / "t.npz", **{"x:venue": np.zeros((3, 2))})  # a type that no edge joins
    assert "venue" in GraphStore.open(prepare.build(tmp_path / "t.npz", tmp_path / "e")).node_types


def test_a_drawn_split_of_a_typed_file_goes_by_the_seed(tmp_path):
    labels = {"y:paper": np.arange(50) % 2}
    file = _npz(tmp_path / "t.npz", **labels)

    def build(seed):
        return GraphStore.open(prepare.build(file, tmp_path / f"g{seed}", seed=seed))

    five, six, drawn = build(5), build(6), build(None)
    assert five.split["train"].tolist() != six.split["train"].tolist()
    assert drawn.meta["split"].startswith("20 nodes of each") and "split" not in five.meta
    _npz(file, **labels, **{"train_idx:paper": [0, 1]})
    _refuses("seed 7 has no effect: it has a split", build, 7)


def test_inputs_of_the_first_layer_are_a_map_or_a_row_of_each_type():
    inputs, x = NodeInputs([(5, 3), (4, 2), (6, 0)], 7), torch.randn(9, 3)
    nodes = torch.tensor([8, 0, 14, 3, 9, 5, 4])
    out = inputs(nodes, x[nodes[nodes < 9]])
    for row, node in zip(out, nodes.tolist()):
        if node < 9:
            wanted = inputs.linears[node >= 5](x[node, : 2 if node >= 5 else 3])
        else:
            wanted = inputs.embedding.weight[node - 9]
        torch.testing.assert_close(row, wanted)
    out.sin().sum().backward()
    grad = inputs.embedding.weight.grad
    assert grad.is_sparse and sorted(grad.coalesce().indices()[0].tolist()) == [0, 5]
    assert inputs(nodes[:0], x[:0]).shape == (0, 7)
    for rows in (torch.ones(7, 3), torch.ones(4, 3)):
        _refuses("rows: 5 of the nodes have features", inputs, nodes, rows, error=ValueError)
    _refuses("features have to come first", NodeInputs, [(5, 0), (4, 2)], 7, error=ValueError)


@pytest.mark.parametrize("bases", [0, 2])
def test_first_layer_of_rgcn_multiplies_its_matrices_by_the_maps_of_the_inputs(bases, monkeypatch):
    """Node types 5 x 3 and 4 x 2 features, 6 embedding rows; edge types from several node types, then from one."""

    class Plain(GNN):
        def embed(self, nodes, x):
            return super().embed(nodes, x)

    def make(kind):
        inputs = NodeInputs([(5, 3), (4, 2), (6, 0)], 7)
        options = dict(num_types=3, bases=bases, inputs=inputs)
        return kind(3, 7, 4, conv=RGCNConv, num_layers=1, **options)

    net, plain = make(GNN), make(Plain)
    plain.load_state_dict(net.state_dict())
    nodes, x = torch.tensor([8, 0, 14, 3, 9, 5, 4]), torch.randn(9, 3)
    indices = torch.tensor([3, 1, 0, 5, 4, 2, 6, 3, 3])
    mixed, apart = [0, 0, 0, 0, 1, 2, 1, 1, 2], [0, 0, 1, 1, 2, 2, 0, 0, 0]
    for types, drop in ((mixed, 0), (apart, 0.5), (apart, 0)):
        block = Block(torch.tensor([0, 6, 6, 9]), indices, nodes, edge_type=torch.tensor(types))
        for model in (net, plain):
            model.zero_grad()
            model.input_dropout = drop
            out = model([block], x[nodes[nodes < 9]], key=1)
            out.sin().sum().backward()
        torch.testing.assert_close(net([block], x[nodes[nodes < 9]], key=1), out)
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense())
    monkeypatch.setattr(NodeInputs, "forward", None)
    net([block], x[nodes[nodes < 9]])
    _refuses("global ids", net, [block._replace(src_nodes=nodes[:3])], x[:2], error=ValueError)


@pytest.mark.parametrize("conv", ["rgcn", "rgat", "gat", "sage"])
def test_exact_inference_is_that_of_all_neighbours(conv, tmp_path):
    graph = GraphStore.open(build_store(tmp_path / "g", **_typed(), symmetrize=True))
    typed = {"num_types": graph.num_edge_types, "bases": 2} if conv[0] == "r" else {}
    inputs = NodeInputs(graph.node_types.values(), 16)
    net = GNN(8, 16, 3, conv=conv, num_layers=2, inputs=inputs, **typed)
    options = dict(batch_size=87, shuffle=False, types=conv[0] == "r")
    (batch,) = NodeLoader(graph, torch.arange(87), [-1, -1], **options)
    assert batch.x.shape[0] == 57
    plain = GNN(8, 16, 3, num_layers=2)
    _refuses("x has 57 rows: 87 are needed", plain, batch.blocks, batch.x, error=ValueError)
    arrays, types = (graph.indptr, graph.indices), {"types": graph.edge_type}
    exact = inference(net.eval(), *arrays, graph.features, **types, chunk=11)
    torch.testing.assert_close(net(batch.blocks, batch.x), exact)
    with pytest.raises(ValueError, match="x has 56 rows, indptr is of 87 nodes"):
        inference(net, *arrays, torch.ones(56, 8), **types)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_adam_of_rows_is_sparse_adam_beside_adam(clip_norm):
    """Clipped as clip_grad_norm_ of torch does, by the norm of all gradients, which grows."""
    rows, sparse = (torch.nn.Embedding(9, 4, sparse=True) for _ in range(2))
    linear, dense = (torch.nn.Linear(4, 2) for _ in range(2))
    sparse.load_state_dict(rows.state_dict())
    dense.load_state_dict(linear.state_dict())
    optimizers = [
        Adam(
            [*rows.parameters(), *linear.parameters()],
            lr=0.1,
            weight_decay=0.1,
            clip_norm=clip_norm,
        ),
        torch.optim.SparseAdam(sparse.parameters(), lr=0.1),
        torch.optim.Adam(dense.parameters(), lr=0.1, weight_decay=0.1),
    ]
    for step in range(5):
        ids = torch.tensor([0, 3, 3, 5 + step % 2])
        for table, matrix in (rows, linear), (sparse, dense):
            (2**step * (table(ids).sin().sum() + matrix.weight.sum())).backward()
        if clip_norm:
            both = [sparse.weight.grad.to_dense(), dense.weight.grad]
            norm = torch.nn.utils.get_total_norm(both)
            torch.nn.utils.clip_grads_with_norm_(dense.parameters(), clip_norm, norm)
            sparse.weight.grad = sparse.weight.grad * (clip_norm / norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(rows.weight, sparse.weight)
    torch.testing.assert_close(linear.weight, dense.weight, rtol=1e-6 if clip_norm else 0, atol=0)


def test_fanouts_by_name():
    names = ["a,writes,p", "p,cites,p", "p,rev_writes,a"]
    for text, lists in (
        ([5, 2], [[5] * 3, [2] * 3]),
        (["writes=10:cites=-1", 4], [[10, -1, 0], [4] * 3]),
        (["p,rev_writes,a=7"], [[0, 0, 7]]),
        (["any=5", 3], [5, 3]),
    ):
        assert hops(text, names) == lists
    said = "--fanout cite=3: no such type of edges; they are a,writes,p; p,cites,p"
    _refuses(said, hops, ["cite=3"], names)
    _refuses("cites=3:cites=4: p,cites,p is there twice", hops, ["cites=3:cites=4"], names)
    uris = ["http://a#b", "c=d", "e"]
    assert hops(fanout("http://a#b=3:c=d=-1,5"), uris) == [[3, -1, 0], [5] * 3]


NODE_FLAGS = "--gpus 0 --model rgcn --fanout 4,4 --hidden 16 --batch-size 60 --dropout 0 --lr 0.01"


@pytest.fixture(scope="module")
def mag(tmp_path_factory):
    graph = "synthetic-mag:scale=0.0004,classes=4,noise=0.5"
    return prepare.prepare(graph, tmp_path_factory.mktemp("mag"), progress=False)


def test_train_learns_resumes_and_predicts_by_type(mag, tmp_path, capsys):
    """The resumed half reads its features through a cache."""
    words = f"--dataset {mag} {NODE_FLAGS}"
    log, straight = _run_here(tmp_path, words, "--epochs 12")
    nodes = "by type, in the order of their ids: 295 paper (128 features), 454 author (no features)"
    assert f"nodes   {nodes}" in capsys.readouterr().out
    assert log[-1]["exact"]["test"] > 0.8
    _run_here(tmp_path, words, "--epochs 7")
    resume = f"--resume {tmp_path}/here.pt --gpus 0"
    _, resumed = _run_here(tmp_path, resume, "--epochs 12 --cache 20KB --verbose")
    assert "rows on disk: 20 KB in host memory" in capsys.readouterr().out
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
    assert _code(f"{resume} --predict {tmp_path}/p.npy") == 0
    graph = GraphStore.open(mag)
    test = graph.split["test"].numpy()
    assert (np.load(tmp_path / "p.npy")[test] == graph.labels.numpy()[test]).mean() > 0.8
    other = prepare.prepare("synthetic-mag:scale=0.0005,classes=4", tmp_path, progress=False)
    (tmp_path / "mymodel.py").write_text(OWN_LAYERS)
    np.save(tmp_path / "pairs.npy", np.array([[0, 1]]))  # as if each type counted from 0
    pairs = f"--edge-type author,writes,paper --pairs {tmp_path}/pairs.npy"
    capsys.readouterr()
    for more, said in (
        (f"{resume} --dataset {other}", "was trained on a graph with node_types"),
        (
            f"--gpus 0 --model {tmp_path}/mymodel.py:Net --dataset {mag} --fanout 2,2",
            "has types of nodes without features, for which built-in",
        ),
        (
            f"--task link --dataset {mag} --gpus 0 {pairs}",
            "pairs.npy: [0, 1] goes from paper to paper: edges are",
        ),
        (f"{words} --task link --edge-type buys", "there is none among author,"),
    ):
        _stops(capsys, said, more, f"--predict {tmp_path}/q.npy")


@pytest.mark.parametrize("task", ["node", "link"])
def test_a_graph_without_any_features_is_reported_so(task, tmp_path, capsys):
    ids = np.arange(60)
    ends = np.stack([ids, np.roll(ids, 1)])
    graph = {"edge_index:n,a,n": ends, "num_nodes:n": 60, "y:n": ids % 2, "train_idx:n": ids[:30]}
    np.savez(tmp_path / "bare.npz", **graph, **{"val_idx:n": ids[30:]})
    words = f"--task {task} --model rgcn --dataset {tmp_path}/bare.npz --symmetrize --epochs 1"
    _run_here(tmp_path, words, "--gpus 0 --fanout 2,2")
    said = capsys.readouterr().out
    assert "data    no features" in said and "1 features" not in said, said
    assert re.search("features +0 x float32", info(next(tmp_path.glob("bare-*"))))


@pytest.mark.parametrize("flags", ["--bases 2 --task link --edge-type cites", "--model sage"])
def test_node_types_are_the_same_for_any_number_of_processes(flags, mag, tmp_path):
    words = f"--dataset {mag} {NODE_FLAGS} {flags}"
    _same_for_any_number_of_processes(tmp_path, words, [(1, 60, 2), (2, 60, 1)], epochs=2)


@pytest.mark.parametrize("how", ["80/10/10", "none", "file"])
def test_links_of_one_type(how, mag, tmp_path):
    """Pairs are edges of one type; held-out ones pass no messages in either direction; other types stay complete."""
    graph, name = GraphStore.open(mag), "author,writes,paper"
    before, number = _edges_by_type(graph), graph.edge_types.index(name)
    if how == "file":
        np.savez(tmp_path / "back.npz", test=[pair[::-1] for pair in before[name]])
        said = "goes from paper to author: edges are author,writes,paper; ids count all nodes, paper from 0, "
        _refuses(said, split_edges, graph, str(tmp_path / "back.npz"), edge_type=number)
        np.savez(how := str(tmp_path / "pairs.npz"), test=before[name][:40])
    made = split_edges(graph, how, edge_type=number)
    pairs = {part: set(map(tuple, made.pairs[part].tolist())) for part in made.pairs}
    held = pairs["valid"] | pairs["test"]
    assert set().union(*pairs.values()) == set(before[name])
    assert not pairs["train"] & held and bool(held) == (how != "none")
    known = made.known_of_type
    ends = known.sources.tolist(), torch.repeat_interleave(known.indptr.diff()).tolist()
    assert {*zip(*ends)} == {*before[name]}
    for kind, left in _edges_by_type(made).items():
        gone = {name: held, "paper,rev_writes,author": {(b, a) for a, b in held}}
        assert set(left) == set(before[kind]) - gone.get(kind, set())


def test_train_on_links_of_one_type(mag, tmp_path, capsys):
    words = f"--dataset {mag} {NODE_FLAGS} --task link --epochs 1 --checkpoint {tmp_path}/c.pt"
    assert _code(f"{words} --edge-type writes") == 0
    out = capsys.readouterr().out
    assert "pairs are edges of type writes, negatives nodes of the destination's type" in out
    assert _code(f"--resume {tmp_path}/c.pt --predict {tmp_path}/h.npy --gpus 0") == 0
    scores = [line for line in out.splitlines() if "MRR" in line][-1]
    assert scores in capsys.readouterr().out
    assert _code(f"--resume {tmp_path}/c.pt --predict {tmp_path}/r.csv --top 1 --gpus 0") == 0
    rows = (tmp_path / "r.csv").read_text().splitlines()
    assert rows[0] == '"source_type","source","destination_type","destination","score"'
    assert len(rows) == 1 + 454 and rows[-1].startswith('"author",453,"paper",')


@pytest.mark.parametrize("file, model", [("timed", "rgcn"), ("typed", "rgcn"), ("typed", "own")])
def test_a_checkpoint_knows_its_types_by_name(file, model, pointing, tmp_path, capsys):
    """The same relations in another order predict the same, also where each node sees its past; to train on, or with
    another relation, it is another graph."""
    (tmp_path / "mymodel.py").write_text(TYPES_MODEL)
    own = f"--model {tmp_path}/mymodel.py:Net"
    arrays, split = dict(np.load(pointing / f"{file}.npz")), {"train": np.arange(50)}
    order = np.array([2, 0, 4, 1, 3])  # the number there of each type
    other = arrays | {"edge_type": order[arrays["edge_type"]]}
    names = [chr(ord("a") + i) for i in np.argsort(order)]
    for name, graph, called in ("g", arrays, "abcde"), ("h", other, names), ("i", other, "abcdx"):
        build_store(tmp_path / name, **graph, split=split, edge_types=[*called])
    words = f"{own if model == 'own' else '--model rgcn'} --gpus 0"
    _run_here(tmp_path, f"--dataset {tmp_path}/g {words} --fanout 3,3 --epochs 1")
    again = f"{words} --resume {tmp_path}/here.pt"
    predict = f"{again} --predict-what logits --predict {tmp_path}"
    line = f"has the edge types of {tmp_path}/here.pt in another order: they go by name"
    for name in "gh":
        capsys.readouterr()
        assert _code(f"{predict}/{name}.npy --dataset {tmp_path}/{name}") == 0
        assert (line in capsys.readouterr().out) == (name == "h")
    expected, logits = (np.load(tmp_path / f"{name}.npy") for name in "gh")
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    for name, has in ("h", "them in another order"), ("i", "x"):
        more = f"--predict {tmp_path}/i.npy" * (name == "i")
        assert _code(f"{again} --dataset {tmp_path}/{name} {more}") == 2
        is_of = f"whose edge types are a; b; c; d; e; {tmp_path}/{name} has {has}"
        assert f"was trained on a graph {is_of}" in capsys.readouterr().err


def test_a_layer_of_a_file_that_sees_no_types_takes_them_in_any_order(pointing, tmp_path):
    (tmp_path / "own.py").write_text("from model import SAGEConv\nclass Mine(SAGEConv): pass")
    words = f"--gpus 0 --model {tmp_path}/own.py:Mine"
    arrays = dict(np.load(pointing / "typed.npz"))
    for name in ("abcde", "badce"):
        build_store(tmp_path / name, **arrays, split={"train": np.arange(50)}, edge_types=[*name])
    _run_here(tmp_path, f"--dataset {tmp_path}/abcde {words} --fanout 3,3 --epochs 1")
    predict = f"{words} --resume {tmp_path}/here.pt --predict {tmp_path}/p.npy"
    assert _code(f"{predict} --dataset {tmp_path}/badce") == 0


def test_a_synthetic_graph_with_types_is_drawn_alike(tmp_path):
    name = "synthetic-mag:scale=0.0004"
    made = (prepare.prepare(name, tmp_path / n, progress=False) for n in "ab")
    one, two = (GraphStore.open(path).meta["files"] for path in made)
    assert one == two
    said = "synthetic-mag: .* is out of range"
    _refuses(said, prepare.prepare, "synthetic-mag:scale=0", tmp_path)
