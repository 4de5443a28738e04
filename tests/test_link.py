"""Tests: extras/links.py, extras/ranking.py."""

import collections
import copy
import itertools
import math
import re
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import ddp
import train
from disk.columns import ALWAYS
from extras import common_neighbours, edge_split, graph_tables, paths, ranking
from extras import links as link
from inference import inference
from loader import Batch, Graph, NodeLoader, from_edge_index
from native import kernels as on_cpu
from run import checkpoint
from sampler import DAMAGED, DamagedGraph, NeighborSampler, hop_key, prefix_sum
from sources import prepare as datasets
from store import GraphStore, build_store
from tasks import metrics
from tests.common import (
    OWN_LAYERS,
    _code,
    _log,
    _mix,
    _random_graph,
    _same_for_any_number_of_processes,
    _stops,
)
from tests.stores import _refuses
from tests.test_layers import cuda_layers, kernels_gpu  # noqa: F401


@pytest.fixture(params=["CPU", "emulated GPU", "torch operations"])
def ways(request, monkeypatch):
    """Draw pairs by the kernels of the CPU, by those of a GPU, emulated, and by torch operations."""
    if request.param == "torch operations":
        monkeypatch.setattr(on_cpu, "load_links", lambda ids, device: None)
    elif request.param == "emulated GPU":
        request.getfixturevalue("cuda_layers")
        kernels_gpu.load_links.cache_clear()
        monkeypatch.setattr(ranking, "kernels", kernels_gpu)
        monkeypatch.setattr(edge_split, "kernels", kernels_gpu)
        monkeypatch.setattr(common_neighbours, "kernels", kernels_gpu)
        monkeypatch.setattr(paths, "kernels", kernels_gpu)


def _link_graph(folder, nodes=300, edges=1500, seed=0, symmetrize=True, **changes):
    """Make a store of random edges with duplicates and self-loops."""
    rng = np.random.default_rng(seed)
    edge_index = rng.integers(0, nodes, (2, edges))
    edge_index = np.concatenate([edge_index, edge_index[:, :20]], 1)
    x = rng.normal(size=(nodes, 8)).astype(np.float32)
    y = rng.integers(0, 3, nodes)
    arrays = {"edge_index": edge_index, "features": x, "labels": y, "split": {"train": [0]}}
    path = build_store(folder / f"links{seed}", **arrays, symmetrize=symmetrize, **changes)
    return GraphStore.open(path)


def _pairs_of(graph):
    """Return the edges of a graph as a list of (source, destination)."""
    return list(zip(graph.indices.tolist(), torch.repeat_interleave(graph.indptr.diff()).tolist()))


def _tuples(pairs):
    return list(map(tuple, pairs.tolist()))


def _holds_out(view, whole):
    """Return whether a view has the edges of the whole graph but those of its pairs to validate and test, both ways."""
    held = set(map(frozenset, _tuples(torch.cat([view.pairs["valid"], view.pairs["test"]]))))
    return _pairs_of(view) == [edge for edge in _pairs_of(whole) if frozenset(edge) not in held]


@pytest.mark.parametrize("ascending", [True, False])
def test_edges_are_found_wherever_they_stand(ascending, ways):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        indptr, indices = _random_graph(rng, 40, 6)
        lists = [part.tolist() for part in indices.tensor_split(indptr[1:-1])]
        lists = [sorted(part, reverse=not ascending) for part in lists]
        all_edges = [(u, v) for v, part in enumerate(lists) for u in part]
        edges = link.Edges(indptr, indices.new_tensor([u for u, _ in all_edges]))
        source = torch.arange(40).repeat_interleave(40)
        target = torch.arange(40).repeat(40)
        there = [(u, v) in set(all_edges) for u, v in zip(source.tolist(), target.tolist())]
        assert edges.has(source, target).tolist() == there
        some = torch.from_numpy(rng.integers(0, 40, (2, 30)))
        wanted = collections.Counter(map(tuple, torch.cat([some, some.flip(0)], 1).t().tolist()))
        places, which = (part.tolist() for part in edges.between(some.t()))
        assert sorted(places) == [i for i, e in enumerate(all_edges) for _ in range(wanted[e])]
        assert all({*all_edges[i]} == {*some[:, n].tolist()} for i, n in zip(places, which))
    empty = link.Edges(torch.zeros(4, dtype=torch.int64), indices[:0])
    assert not empty.has(torch.arange(3), torch.arange(3)).any()
    assert not empty.between(torch.arange(6).view(3, 2) % 3)[0].numel()


@pytest.mark.parametrize("symmetrize", [True, False])
def test_link_split_holds_edges_out_with_their_reverses(symmetrize, tmp_path):
    graph = _link_graph(tmp_path, symmetrize=symmetrize)
    view = link.split_edges(graph, "80/10/10", 3)
    whole = _pairs_of(graph)
    proper = {frozenset(edge) for edge in whole if edge[0] != edge[1]}
    pairs = _tuples(torch.cat(list(view.pairs.values())))
    assert set(pairs) <= set(whole) and _holds_out(view, graph)
    assert set(map(frozenset, pairs)) == proper and len(pairs) == len(proper)
    assert [len(view.pairs[name]) for name in ("valid", "test")] == [len(proper) // 10] * 2
    both = sum((v, u) in set(whole) for u, v in pairs)
    upwards = sum(u < v for u, v in pairs) / len(pairs)
    assert 0.4 < upwards < 0.6 and (both == len(pairs)) == symmetrize
    other = link.split_edges(graph, "80/10/10", 4)
    assert not torch.equal(other.pairs["test"], view.pairs["test"])
    rows = torch.zeros(graph.num_nodes, 2)
    here = link.split_edges(Graph(graph.indptr, graph.indices, rows, rows), "80/10/10", 3)
    assert torch.equal(here.pairs["test"], view.pairs["test"])
    links = link.Links(here, here.indptr, here.indices)
    batch = next(iter(NodeLoader(here, here.split["train"], [2], draw=links.draw)))
    assert len(batch.x) == len(batch.blocks[0].src_nodes)
    everywhere = link.split_edges(graph, "none", 3)
    assert len(everywhere.pairs["train"]) == len(proper) and everywhere.num_edges == graph.num_edges


def test_link_split_by_time_and_from_a_file(tmp_path):
    graph = _link_graph(tmp_path, symmetrize=False)
    said = "80/10/10 goes by the times of edges, and .* has none"
    _refuses(said, link.split_edges, graph, "time:80/10/10")
    for name, place, value in (("indices", 0, -1), ("indptr", -1, graph.num_edges + 1)):
        damaged = copy.copy(graph)
        setattr(damaged, name, getattr(graph, name).clone())
        getattr(damaged, name)[place] = value
        _refuses(DAMAGED, link.split_edges, damaged, "80/10/10", error=DamagedGraph)
    graph.edge_time = torch.from_numpy(np.random.default_rng(0).permutation(graph.num_edges))
    view = link.split_edges(graph, "time:80/10/10")
    assert len(view.edge_time) == view.num_edges == len(view.indices)
    whole = _pairs_of(graph)
    file = tmp_path / "split.npz"
    no_edge = 0, next(v for v in range(1, 300) if not {(0, v), (v, 0)} & {*whole})
    given = {"valid": [whole[5], whole[9]], "test": [whole[200], no_edge]}
    np.savez(file, **given)
    view = link.split_edges(graph, str(file))
    assert {name: _tuples(view.pairs[name]) for name in given} == given
    assert _holds_out(view, graph)
    # no negative is to be a pair of the file
    assert view.known_edges.has(*torch.tensor([no_edge]).t()).all()
    for message, arrays in (
        (r"valid is \[3\] int64: integers or names \[n, 2\] are needed", {"valid": [1, 2, 3]}),
        (r"test\[1, 1\] is 300: node ids lie in \[0, 300\)", {"test": [[0, 1], [0, 300]]}),
        ("has a part 'vel': parts are train, valid, test", {"vel": [[0, 1]]}),
        ("has 'val' and 'valid', which mean the same", {"val": [[0, 1]], "valid": [[0, 1]]}),
        (r"leave the self-loop \[7, 7\] out of valid", {"valid": [whole[5], [7, 7]]}),
        (r"\[1, 0\] is in valid and in test: keep", {"valid": [[3, 1], [1, 0]], "test": [[0, 1]]}),
        (r"\] in train is no edge, or is held out", {"train": [whole[5]], "test": [whole[5]]}),
    ):
        np.savez(file, **arrays)
        _refuses(message, link.split_edges, graph, str(file))


NAMES_OF = {
    "none": lambda nodes, rng: np.arange(nodes),
    "numbers": lambda nodes, rng: rng.permutation(nodes) + 1,
    "text": lambda nodes, rng: np.array([f"n{i}" for i in rng.permutation(nodes)]),
}


@pytest.mark.parametrize("kind", NAMES_OF)
def test_pairs_are_given_by_the_names_of_nodes(kind, tmp_path, capsys):
    """In a file of --edge-split and in --pairs, on another graph too: results are those of row numbers."""
    rng = np.random.default_rng(0)
    file = tmp_path / "split.npz"
    asked = tmp_path / "pairs.npy"
    names, other = (NAMES_OF[kind](300, rng) for _ in range(2))
    named = {} if kind == "none" else {"node_names": names.tolist()}
    graph = _link_graph(tmp_path, symmetrize=False, **named)
    plain = _link_graph(tmp_path / "plain", symmetrize=False)
    theirs = _link_graph(tmp_path, seed=1, **(named and {"node_names": other.tolist()}))
    edges = {frozenset(edge): edge for edge in _pairs_of(graph) if edge[0] != edge[1]}
    apart = [
        pair for pair in rng.integers(0, 300, (99, 2)).tolist() if frozenset(pair) not in edges
    ]
    edges = [*edges.values()]
    rows = {"valid": edges[:20], "test": apart[:7] + edges[20:50], "train": edges[50:]}
    rows = {part: np.array(pairs) for part, pairs in rows.items()}
    np.savez(file, **{part: names[pairs] for part, pairs in rows.items()})
    said = []
    view = link.split_edges(graph, str(file), say=said.append)
    for part, pairs in view.pairs.items():
        assert pairs.tolist() == rows[part].tolist()
    counts = "20 of 20 valid and 30 of 37 test pairs are edges of the graph"
    assert said == [f"edges   of {file}: {counts}"] and _holds_out(view, graph)
    np.save(asked, pairs := names[rows["test"]])
    words = f"{LINK} --epochs 1 --edge-split {file} --pairs {asked} --predict {tmp_path}"
    assert _code(words + f"/0.npy --dataset {graph.path} --checkpoint {tmp_path}/l.pt") == 0
    assert counts in (out := capsys.readouterr().out)
    assert ("files of pairs hold names of nodes" in out) == (kind != "none")
    table = tmp_path / "pairs.csv"
    written = f"--gpus 0 --resume {tmp_path}/l.pt --edge-split none --predict {tmp_path}/t.csv"
    assert _code(written, f"--pairs {asked}") == 0
    scored = (tmp_path / "t.csv").read_text()
    for header, order in (("source,target\n", [0, 1]), ("id_2,id_1\n", [1, 0]), ("", [0, 1])):
        cells = pairs[:, order].astype(str)
        table.write_text(header + "".join(map("{0[0]},{0[1]}\n".format, cells)))
        assert _code(written, f"--pairs {table}") == 0
        assert (tmp_path / "t.csv").read_text() == scored
    np.save(asked, pairs[:1])
    assert _code(written, f"--pairs {asked}") == 0
    assert (tmp_path / "t.csv").read_text().splitlines() == scored.splitlines()[:2]
    assert _code(written, "--top 1") == 0
    best = np.loadtxt(tmp_path / "t.csv", str, delimiter=",", quotechar='"', skiprows=1)
    assert [*best[:, 0]] == [*names.astype(str)] and {*best[:, 1]} < {*best[:, 0]}
    table.write_text("source,target\n-5,zoe\n")
    _stops(capsys, "pairs.csv[,:] line 2", written, f"--pairs {table}")
    again = f"--gpus 0 --resume {tmp_path}/l.pt --edge-split none --pairs {asked}"
    np.save(asked, other[rows["test"]])
    assert _code(again, f"--dataset {theirs.path} --predict {tmp_path}/2.npy") == 0
    np.save(asked, rows["test"])
    np.savez(file, **rows)
    unnamed = _link_graph(tmp_path / "plain", seed=1).path
    assert _code(words + f"/1.npy --dataset {plain.path}") == 0
    assert _code(again, f"--dataset {unnamed} --predict {tmp_path}/3.npy") == 0
    scores = [np.load(tmp_path / f"{number}.npy") for number in range(4)]
    assert np.array_equal(*scores[:2]) and np.array_equal(*scores[2:])
    np.savez(file, train=names[apart[:1]])
    u, v = names[apart[0]].tolist()
    _refuses(rf"{u}'?, '?{v}'?\] in train is no edge", link.split_edges, graph, str(file))
    capsys.readouterr()
    unknown = "has node '.*': names of nodes are such as"
    unknown = "is text, and the nodes have no names" if kind == "none" else unknown
    objects = "cannot be read: Object arrays .*; save text by .astype.str."
    for dtype, complaint in ((str, unknown), (object, objects)):
        np.save(asked, np.array([["n1", "zoe"]], dtype))
        _stops(
            capsys,
            f"--pairs {asked} {complaint}",
            again,
            f"--dataset {theirs.path} --predict {tmp_path}/2.npy",
        )


def _negatives_by_the_law(graph, key, numbers, sources, count, *, upto):
    """Draw negatives in plain Python: redraw, `count` draws further on, while it is an edge or the node itself."""
    edges = set(_pairs_of(graph))
    found = []
    for number, source in zip(numbers.tolist(), sources.tolist()):
        for which in range(count):
            node = source
            while node == source or (source, node) in edges:
                bits = _mix(_mix(key ^ number) ^ which) >> 11
                node = (bits >> 21) * graph.num_nodes >> 32
                if upto:
                    node = sum(end <= int(bits * (upto[-1] / 2**53)) for end in upto)
                which += count
            found.append(node)
    return torch.tensor(found).view(-1, count)


@pytest.mark.parametrize("by_degree", [False, True])
def test_negatives_follow_the_law_and_are_no_edges(by_degree, tmp_path, ways):
    graph, upto, degrees = _link_graph(tmp_path, nodes=60, edges=600), None, None
    if by_degree:
        degrees = graph.indptr.diff()
        upto = list(itertools.accumulate(int(d**0.75 * 1024) for d in degrees.tolist()))
    edges = link.Edges(graph.indptr, graph.indices)
    numbers = torch.randint(0, 1 << 40, (200,))
    pairs = torch.randint(0, 60, (200, 2))
    negatives = link.Negatives(edges, 60, degrees)
    sources = pairs[:, 0]
    drawn = negatives.draw(12345, numbers, pairs, 7)
    each = sources.unsqueeze(1).expand(200, 7)
    assert torch.equal(drawn, _negatives_by_the_law(graph, 12345, numbers, sources, 7, upto=upto))
    unchecked = link.Negatives(None, 60, degrees).draw(12345, numbers, pairs, 7)
    assert edges.has(each, unchecked).any() and not (unchecked == each).any()
    drawn = link.Negatives(None, 1 << 32).draw(5, numbers, pairs, 7)
    assert drawn.min() >= 0 and 1 << 31 < drawn.max() < 1 << 32
    counts = [5, 40, 15]  # of the type of the node that they replace
    negatives = link.Negatives(edges, 60, degrees, counts)
    kind = torch.arange(3).repeat_interleave(torch.tensor(counts))
    numbers = torch.arange(3000)
    pairs = torch.randint(0, 60, (3000, 2))
    drawn = negatives.draw(99, numbers, pairs, 4)
    sources = pairs[:, :1].expand(-1, 4)
    assert torch.equal(kind[drawn], kind[pairs[:, 1:]].expand(-1, 4))
    assert not edges.has(sources, drawn).any() and not (drawn == sources).any()
    assert len(drawn.unique()) == 60  # all of each type
    assert torch.equal(kind[negatives.pairs(7, pairs)], kind[pairs])


def test_a_node_with_an_edge_to_nearly_every_node_has_negatives_still(monkeypatch, ways):
    nodes, calls, has = 500, [], link.Edges.has  # node 0 has an edge to all but the last
    monkeypatch.setattr(link.Edges, "has", lambda *args: calls.append(0) or has(*args))
    indptr = torch.cat([torch.tensor([0]), torch.arange(nodes - 1) + 1, torch.tensor([nodes - 1])])
    edges = link.Edges(indptr, torch.zeros(nodes - 1, dtype=torch.int32))
    zeros = torch.zeros(20, 2, dtype=torch.int64)
    assert (link.Negatives(edges, nodes).draw(7, torch.arange(20), zeros, 3) == nodes - 1).all()
    full = link.Edges(torch.arange(nodes + 1), torch.zeros(nodes, dtype=torch.int32))
    counts = [nodes - 100, 100]  # one free node of the second type, none of the first
    first, second = (zeros + torch.tensor([0, end]) for end in (1, nodes - 5))
    for pairs in (first, second):
        drawn = link.Negatives(edges, nodes, None, counts).draw(7, torch.arange(20), pairs, 3)
        assert (drawn == nodes - 1).all()
    said = "node 0 has an edge to every node.*--edge-split none --unchecked-negatives"
    _refuses(said, link.Negatives(full, nodes).draw, 7, torch.arange(20), zeros, 3)
    assert len(calls) <= 4 * (ranking.TRIES + 2)  # few, however many nodes the graph has


def test_a_small_type_without_negatives_costs_no_look_up_of_the_whole_graph(monkeypatch):
    sizes, has = [], link.Edges.has
    monkeypatch.setattr(
        link.Edges, "has", lambda *args: sizes.append(args[1].numel()) or has(*args)
    )
    indptr = torch.arange(100_001).clamp(max=5)  # node 7 has edges to the first five
    negatives = link.Negatives(link.Edges(indptr, torch.full((5,), 7)), 100_000, counts=[5, 99_995])
    drawn = negatives.draw(3, torch.arange(4), torch.tensor([[7, 2]] * 4), 3)
    assert (drawn > 4).all() and (drawn != 7).all() and sum(sizes) < 2000


def test_edges_that_repeat_take_no_memory_in_a_ranking():
    """A chunk of pairs lists all destinations of their sources."""
    graph = types.SimpleNamespace(indices=torch.zeros(5001, dtype=torch.int32), num_nodes=4)
    graph.indptr = torch.tensor([0, 5000, 5001, 5001, 5001])
    evaluation = link.Evaluation(link.split_edges(graph, "none"))
    assert ranking.left_out(evaluation.lists, torch.tensor([0, 0]))[1].tolist() == [
        0,
        1,
        0,
        1,
        0,
        0,
    ]


def _some_of(graph, step, count):
    generator = torch.Generator().manual_seed(step)
    return torch.randperm(len(graph.pairs["train"]), generator=generator)[:count]


def _sampled(links, draw, seeds, step, step_seeds, **other):
    """Return (blocks, y) of a step's pairs, as `NodeLoader` makes them; other: options of the sampler instead."""
    batch = Batch([], None, None, seeds, global_step=step, step_seeds=step_seeds)
    nodes, options, y = links.draw(batch)
    return draw.sample(nodes, step, **options | other), y


def _edges_of(block):
    """Return the undirected edges of a block."""
    targets = torch.repeat_interleave(block.indptr.diff().long())
    ends = (block.src_nodes[ids].tolist() for ids in (block.indices.long(), targets))
    return set(map(frozenset, zip(*ends)))


@pytest.mark.parametrize("kind", ["plain", "timed", "leak"])
def test_no_positive_of_a_step_lies_in_its_blocks(kind, tmp_path, ways):
    """Nor those of other processes, which share the step. Without exclusion all blocks hold some. With times a pair and
    its negatives have its time, and a node may be there at several; what it then sees is tested with the sampler."""
    timed = kind == "timed"
    whole = _timed_links(tmp_path, nodes=60) if timed else _link_graph(tmp_path)
    graph = link.split_edges(whole, "80/10/10", timed=timed)
    edge_times = graph.edge_time if timed else None
    csc = graph.indptr, graph.indices
    draw = NeighborSampler(*csc, [-1, -1], edge_ids=True, edge_times=edge_times)
    links = link.Links(graph, *csc, negatives=2)
    kept = {"exclude": None} if kind == "leak" else {}
    hops = {hop_key(0, step, hop) for step in range(-1, 9) for hop in range(9)}
    assert hops.isdisjoint(link.mix(links.key ^ step) for step in range(9))
    for step in range(20):
        everyone = _some_of(graph, step, 60)
        seeds = everyone[20:40]
        blocks, y = _sampled(links, draw, seeds, step, everyone, **kept)
        nodes = blocks[-1].src_nodes[: blocks[-1].num_dst]
        assert y.shape == (20, 4)
        assert torch.equal(nodes[y[:, :2]].long(), graph.pairs["train"][seeds])
        assert (len(nodes) > len(nodes.unique())) == timed
        assert torch.equal(nodes, nodes.sort()[0]) or timed
        if timed:
            assert (blocks[-1].src_times[y] == graph.pair_times["train"][seeds, None]).all()
        held = {frozenset(pair) for pair in graph.pairs["train"][everyone].tolist()}
        assert bool(held & set().union(*map(_edges_of, blocks))) == (kind == "leak")
    assert torch.equal(_sampled(links, draw, seeds, step, everyone)[1], y)
    # a rank's or pass's part of the last step may be empty
    nodes, _, none = links.draw(Batch(seeds=everyone[:0], global_step=0, step_seeds=everyone))
    assert not len(nodes) and none.shape == (0, 4)
    for softmax in (False, True):
        links.softmax = softmax
        assert links.loss(link.Scorer("mlp", 4), torch.randn(5, 4), y[:0]) == 0


def _expected(logit, pairs, against, random):
    """Compute the figures of an evaluation in plain Python. logit: function of a pair's number and two nodes. against:
    the nodes each pair is ranked against. random: as many pairs without an edge."""
    places = []
    lists = collections.defaultdict(list)
    scored = [[logit(i, *pair) for i, pair in enumerate(some)] for some in (pairs, random)]
    for i, (u, others) in enumerate(zip(next(zip(*pairs)), against)):
        if not len(others):
            continue  # nothing to be ranked against
        over = [logit(i, u, w) - scored[0][i] for w in others]
        ties = sum(abs(x) < 1e-12 for x in over)  # get their mean rank
        places.append(1 + sum(x >= 1e-12 for x in over) + ties / 2)
        lists[u].append(places[-1])
    right = [(a > b) + (a == b) / 2 for a in scored[0] for b in scored[1]]
    hits = {f"hits@{k}": np.mean([place <= k for place in places]) for k in (1, 10)}
    at_3 = []  # average precision, NDCG and recall of each source's list, with all that is relevant
    for some in lists.values():
        some = [place + i for i, place in enumerate(sorted(some))]
        found = [(i, place) for i, place in enumerate(some, 1) if place <= 3]
        gains, best = (
            [1 / math.log2(n + 1) for n in ns] for ns in (dict(found).values(), range(1, 4))
        )
        most = min(3, len(some))
        precisions = sum(i / place for i, place in found) / most
        at_3.append([precisions, sum(gains) / sum(best[:most]), len(found) / len(some)])
    hits |= zip(("MAP@3", "NDCG@3", "Recall@3"), np.mean(at_3, 0).tolist()) if at_3 else ()
    return {"mrr": np.mean([1 / place for place in places]), "roc_auc": np.mean(right), **hits}


def _check_best(evaluation, scorer, h, logit, known, sources):
    """Check the best 4 destinations of the first nodes: all others, or those behind them if these are not all."""
    first = sources % len(h)
    rows = collections.defaultdict(list)
    for some in evaluation.best(scorer, h, 4):
        for u, v, score in zip(*(column.tolist() for column in some)):
            assert v >= first and v != u and (u, v) not in known
            assert score == pytest.approx(logit(0, u, v))
            rows[u].append(score)
    for u in range(sources):
        others = [v for v in range(first, len(h)) if v != u and (u, v) not in known]
        expected = sorted([logit(0, u, v) for v in others], reverse=True)[:4]
        assert rows[u] == pytest.approx(expected)


@pytest.mark.parametrize("timed, strict", [(False, False), (True, False), (True, True)])
def test_what_nodes_have_in_common_is_what_plain_python_counts(timed, strict, ways, monkeypatch):
    """Whatever the order of the lists; nothing of it depends on the edges between the two nodes at the time of the pair."""
    monkeypatch.setattr(paths, "HUB", 6)
    monkeypatch.setattr(paths, "MEANS", 1)
    for seed in range(6):
        for module in (paths, common_neighbours):
            monkeypatch.setattr(module, "lanes_of", lambda pairs: 1 + seed // 2)  # noqa: B023
        rng = np.random.default_rng(seed)
        source, destination = ends = rng.integers(0, 12, (2, 60))
        times, when = rng.integers(0, 10, 60), rng.integers(0, 12, 50)
        times = np.where(rng.random(60) < 0.1, ALWAYS, times)
        order = np.lexsort([destination, *[[source, times], [times, source]][seed % 2]][::-1])
        order = order[np.argsort(destination[order], kind="stable")]
        (source, destination), times = ends[:, order], times[order]
        indptr = torch.tensor(np.append(0, np.bincount(destination, minlength=12).cumsum()))
        edges = edge_split.Edges(indptr, torch.tensor(source, dtype=torch.int32))
        known = common_neighbours.CommonNeighbours(
            edges, torch.tensor(times) if timed else None, strict
        )
        pairs = torch.tensor(rng.integers(0, 12, (50, 2)))
        found = known.pair_features(pairs, torch.tensor(when) if timed else None)
        typical = round(math.exp(np.mean(np.log(np.maximum(np.diff(indptr), 1)))))
        weights = [lambda d: 1, lambda d: d**-0.5, lambda d: 1 / math.log(d + 1), lambda d: 1 / d]
        for (u, v), row, now in zip(pairs.tolist(), found.tolist(), when):

            def seen(node, strict=strict):
                early = times < now if strict else times <= now  # noqa: B023
                return source[(destination == node) & (early | (not timed))].tolist()  # noqa: B023

            shared = ({*seen(u)} & {*seen(v)}) - {u, v}
            degrees = [max(len(seen(w)), 1) for w in shared]
            sums = [math.log1p(sum(g(d) for d in degrees) / g(typical)) for g in weights]
            if not timed:  # paths u <- a <- b -> v of four different nodes, no hubs
                through = {(a, b) for a in seen(u) for b in {*seen(a)} & {*seen(v)}}
                through = [path for path in through if len({u, v, *path}) == len({u, v}) + 2]
                through = [path for path in through if max(len(seen(w)) for w in path) <= 6]
                share = sum(
                    math.prod(weights[1](max(len(seen(w)), 1)) for w in path) for path in through
                )
                sums.append(math.log1p(share / weights[1](typical) ** 2))
            expected = [*sums, math.log1p(len(seen(v, True)))]
            assert row[: len(expected)] == pytest.approx(expected, abs=1e-5)
            if timed and seen(v, True):
                here = destination == v
                last = max(t for t in times[here].tolist() if t < now)
                span = times.max() - times[times > ALWAYS].min() + 1
                recent = max(math.log(int(span) / (int(now) - last + 1)), 0)
                assert row[5] == pytest.approx(recent, abs=1e-5)
        if not timed:
            every = torch.cartesian_prod(torch.arange(12), torch.arange(12))
            others = every[:, 0] != every[:, 1]
            rows = known.against_all(torch.arange(12)).view(144, -1)
            torch.testing.assert_close(rows[others], known.pair_features(every)[others])


@pytest.mark.parametrize("kind", ["dot", "distmult", "mlp", "ncn"])
@pytest.mark.parametrize("small", [True, False])
def test_link_evaluation_is_what_plain_python_counts(kind, small, tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "SMALL", 1 << 14 if small else 0)
    monkeypatch.setattr(ranking, "CHUNK", 4000)
    whole = _link_graph(tmp_path, nodes=80, edges=300, symmetrize=False)
    graph = link.split_edges(whole, "70/10/20")
    torch.manual_seed(0)
    scorer = link.Scorer(kind, 6).double()
    known = set(_pairs_of(whole))
    h = torch.randint(-3, 4, (80, 6)).double()  # with ties
    if kind in ("distmult", "ncn"):
        torch.nn.init.normal_(scorer.relation)
    evaluation = link.Evaluation(graph, k=3)
    found = evaluation(scorer, h, "test")

    def logit(_, u, v):
        product = h[u] * h[v]
        relation = scorer.relation if kind in ("distmult", "ncn") else 1
        if kind == "ncn":
            shared = evaluation.common.pair_features(torch.tensor([[u, v]]))[:, :4].double()
            directions = (
                9 * torch.nn.functional.normalize(h[[u, v]], dim=1).prod(0) * relation
            ).sum()
            return (directions + 5 * scorer.common(shared)).item()
        return (scorer.mlp(product) if kind == "mlp" else (product * relation).sum()).item()

    pairs = _tuples(graph.pairs["test"])
    examples = evaluation.examples["test"]
    random, others = examples.random, examples.others
    free = [[w for w in range(80) if w not in (u, v) and (u, w) not in known] for u, v in pairs]
    against = free if small else others.tolist()
    assert all(set(some) <= set(all_free) for some, all_free in zip(against, free))
    expected = _expected(logit, pairs, against, random.tolist())
    assert expected == {name: pytest.approx(found[name]) for name in expected}
    assert len(random) == len(pairs) and not known & set(_tuples(random))
    _check_best(evaluation, scorer, h, logit, known, 80)
    rows = []
    for rank in range(3):
        part = ddp.Ranks(rank, 3).part
        ranks = types.SimpleNamespace(part=part, gather=lambda t: rows.append(t) or [t])
        evaluation(scorer, h, "test", ranks)
    ranks.gather = lambda _: rows
    assert evaluation(scorer, h, "test", ranks) == pytest.approx(found)
    assert evaluation(scorer, h, "valid")
    if kind == "ncn":
        return  # pairs of equal embeddings differ
    same = torch.randn(9, 1, 64).expand(9, 80, 64)  # ties, also in products that round
    ties = [evaluation(link.Scorer(kind, 64), h, "test")["mrr"] for h in same]
    assert small or ties == pytest.approx([1 / 51] * 9, rel=0.05)
    assert link.Evaluation(link.split_edges(whole, "none"))(scorer, h, "test") is None
    # NaN is above no other score: a network that has lost its numbers would rank every pair first
    unseen = set(range(80)) - set(torch.cat([examples.pairs, random]).flatten().tolist())
    bad = [torch.full_like(h, 1e300), h.clone()]  # finite, and its product with itself is not
    bad[1][min(unseen)] = math.nan  # only ranked against
    for broken in bad:
        _refuses(
            "scores are not finite", evaluation, scorer, broken, "test", error=metrics.NotFinite
        )


def _timed_links(folder, nodes=200, edges=1200, **changes):
    """Make a store of random edges at random times, with duplicates and edges in both directions."""
    times = np.random.default_rng(5).integers(0, 500, edges + 20)
    return _link_graph(folder, nodes, edges, edge_time=times, **changes)


@pytest.mark.parametrize("times_of", ["edges", "edges of types", "nodes", "nodes, both ways"])
def test_a_pair_has_the_time_of_its_first_edge_or_of_the_later_of_its_nodes(times_of, tmp_path):
    """Lists of edges are by type, then time. What the scorer knows of a destination holds nothing of the pair's own edges."""
    rng, sizes = np.random.default_rng(5), dict(nodes=40, edges=500)
    if "nodes" in times_of:
        kinds = {"node_time": rng.integers(0, 500, 40), "symmetrize": "both" in times_of}
        graph = _link_graph(tmp_path, **sizes, **kinds)
        known = {frozenset(pair): kinds["node_time"][[*pair]].max() for pair in _pairs_of(graph)}
    else:
        kinds = {"edge_type": np.arange(520) % 3} if "types" in times_of else {}
        graph = _timed_links(tmp_path, **sizes, **kinds, symmetrize=not kinds)
        graph.edge_time = graph.edge_time.where(graph.edge_time < 450, 2**63 - 1)
        known = {}
        for pair, when in zip(map(frozenset, _pairs_of(graph)), graph.edge_time.tolist()):
            known[pair] = min(when, known.get(pair, when))
    for how in ("70/20/10", "time:70/20/10"):
        view = link.split_edges(graph, how, seed=3, timed=True)
        for part, pairs in view.pairs.items():
            assert view.pair_times[part].tolist() == [known[frozenset(p)] for p in pairs.tolist()]
    pairs, times = view.pairs["train"][::9], view.pair_times["train"][::9]
    found = link.Evaluation(view).common.pair_features(pairs, times)[:, 4:]
    for pair, when, columns in zip(pairs.split(1), times.split(1), found):
        without = edge_split.without_edges(view, edge_split.edges_of(view, None), pair)
        without = link.Evaluation(without).common.pair_features(pair, when)[0, 4:]
        assert torch.allclose(columns, without)
    said = []
    static = link.split_edges(graph, "time:70/20/10", seed=3, say=said.append)
    last = view.pair_times["train"].max()
    when = edge_split.there_since(graph)
    held = {frozenset(p) for part in ("valid", "test") for p in view.pairs[part].tolist()}
    kept = [t <= last and {*p} not in held for p, t in zip(_pairs_of(graph), when.tolist())]
    assert static.num_edges == sum(kept)
    assert sum(kept) < view.num_edges or "nodes" in times_of
    assert edge_split.there_since(static).max() <= last and f"{sum(kept):,} of " in said[0]
    # the last view is split by that time: no pair that is predicted is earlier than one that is learnt from
    train, valid, test = (view.pair_times[part] for part in ("train", "valid", "test"))
    assert train.max() <= valid.min() and valid.max() <= test.min()
    assert link.split_edges(graph, "70/20/10").pair_times is None


@pytest.mark.parametrize("most", [2, 100])
def test_historical_negatives_are_earlier_destinations_of_the_source(most, tmp_path, monkeypatch):
    """All of them, or as many as fit, and never one at the time of the pair; random ones where there are fewer."""
    monkeypatch.setattr(ranking, "RANKED_AGAINST", most)
    whole = _timed_links(tmp_path, 30, 400, symmetrize=False)
    whole.edge_time //= 40  # pairs with edges at the same times
    graph = link.split_edges(whole, "60/10/30", timed=True)
    known = _pairs_of(whole)
    edges = {*zip(*zip(*_pairs_of(graph)), graph.edge_time.tolist())}
    trained = dict(zip(_tuples(graph.pairs["train"]), graph.pair_times["train"].tolist()))
    counts = collections.Counter()
    for part in ("valid", "test"):
        examples = link.Evaluation(graph, historical=True).examples[part]
        others, random = (examples.nodes[places] for places in (examples.others, examples.random))
        rows = zip(_tuples(graph.pairs[part]), graph.pair_times[part].tolist())
        for ((u, _), now), negatives, one in zip(rows, others.tolist(), random.tolist()):
            earlier = {w for (source, w), time in trained.items() if source == u and time < now}
            allowed = {w for w in earlier if (u, w, now) not in edges}
            left = [w for w in negatives if w not in earlier]
            assert len(negatives) == most and {*negatives} <= allowed | {*left}
            assert not {(u, w) for w in left} & {*known}
            if len(earlier) <= most:
                assert {*negatives} >= allowed
            assert len(left) == max(most - len(allowed), 0) or len(earlier) > most
            assert one[0] == u and (one[1] in allowed or (u, one[1]) not in known)
            counts["earlier" if len(earlier) > len(allowed) else "all"] += 1
            counts["many"] += len(earlier) > most
    assert counts["earlier"] and bool(counts["many"]) == (most == 2)


LINK = "--task link --gpus 0 --fanout 4,4 --hidden 16 --lr 0.01 --edge-split 80/10/10"


@pytest.mark.parametrize("kind", ["untimed", "timed", "own"])
def test_links_are_the_same_for_any_number_of_processes(kind, tmp_path):
    """In fp64 to 1e-9, with dropout and a smaller last step: exclusion covers the pairs of all processes."""
    (tmp_path / "net.py").write_text(OWN_LAYERS.replace("dropout=0.3", "dropout=0.0"))
    words, runs = {
        "untimed": ("--scorer mlp --dropout 0.5", [(1, 300, 1), (3, 100, 1), (1, 100, 3)]),
        "timed": ("--model gin --temporal before --dropout 0.5", [(1, 90, 1), (2, 45, 1)]),
        "own": (f"--scorer distmult --model {tmp_path}/net.py:Net", [(1, 300, 1), (2, 150, 1)]),
    }[kind]
    timed = kind == "timed"
    graph = _timed_links(tmp_path, 120, 400) if timed else _link_graph(tmp_path, 500, 1000)
    words = f"{LINK} --dataset {graph.path} --negatives 2 {words}"
    _same_for_any_number_of_processes(tmp_path, words, runs, epochs=2)


def test_links_at_their_times_are_refused_in_a_sentence(tmp_path, capsys):
    timed = _timed_links(tmp_path).path
    plain = _link_graph(tmp_path, seed=1).path
    np.savez(tmp_path / "none.npz", test=[[0, 1]])
    gcn = "--model gcn divides by the degrees of the whole graph"
    no_edge = r"none.npz: the pair \[0, 1\] has no time, for it is no edge; --temporal off takes it"
    for path, words, complaint in (
        (plain, "--temporal at", "--temporal goes by the times of edges, and .* has none"),
        (timed, "--temporal before --model gcn", gcn),
        (timed, "--temporal at --scorer paths", "--scorer paths counts edges of all times"),
        (
            plain,
            "--eval-negatives historical",
            "--eval-negatives .* is of times, --temporal is off",
        ),
        (plain, "--top 3 --predict x.npy", "--top 3 writes a table of all sources: give --predict"),
        (timed, "--sampler latest", "--sampler latest needs times of edges .* here off"),
        (timed, f"--temporal at --edge-split {tmp_path}/none.npz", no_edge),
    ):
        _stops(capsys, complaint, LINK, "--dataset", path, words)
    assert (
        _code(
            LINK,
            "--dataset",
            timed,
            "--epochs 1 --temporal before --sampler latest --eval-negatives historical",
        )
        == 0
    )
    used = "the source had an edge before;.*the ends of a pair and its negatives see edges before .*neighbours are the latest"
    assert re.search(used, capsys.readouterr().out, re.DOTALL)


@pytest.mark.parametrize("name", ["gcn", "mymodel.py:Net"])
def test_link_task_learns_writes_embeddings_and_scores(name, tmp_path, capsys):
    """On a graph of communities, whose edges can be predicted from their ends."""
    (tmp_path / "mymodel.py").write_text(OWN_LAYERS)
    own = ":" in name
    network = f"--model {tmp_path / name if own else name}"
    spec = "synthetic:nodes=1000,degree=10,features=16,classes=4,train=100"
    path = datasets.prepare(spec, tmp_path, progress=False)
    words = f"{LINK} --dataset {path} {network} --fanout 10,10 --epochs 6 --batch-size 300 --metric roc_auc --early-stop 6"
    files = f"--checkpoint {tmp_path}/l.pt --log {tmp_path}/log --predict {tmp_path}/h.npy"
    assert _code(words, files, "--scorer dot" if own else "--dropout 0") == 0
    log = _log(tmp_path / "log")
    losses = [line["loss"] for line in log if "loss" in line]
    (scores,) = (line["scores"] for line in log if "scores" in line)
    assert losses[-1] < losses[0] and scores["test"]["roc_auc"] > 0.6, log[-1]
    known = link.split_edges(GraphStore.open(path), "80/10/10")
    known = common_neighbours.CommonNeighbours(link.Edges(known.indptr, known.indices))
    assert list(log[-1]["baselines"]["test"]) == [*known.columns]
    h = np.load(tmp_path / "h.npy")
    graph = GraphStore.open(path)
    assert h.shape == (1000, 16) and h.dtype == np.float32
    again = f"--resume {tmp_path}/l.pt --gpus 0 {network if own else ''}"
    pairs = np.random.default_rng(0).integers(0, 1000, (50, 2))
    np.save(tmp_path / "pairs.npy", pairs)
    scored = f"--pairs {tmp_path}/pairs.npy --predict {tmp_path}/s.npy"
    assert _code(again, scored, f"--log {tmp_path}/again") == 0
    assert scores in [line.get("scores") for line in _log(tmp_path / "again")]
    expected = torch.tensor(h[pairs].prod(1).sum(1))
    if not own:
        scorer = checkpoint.load_model(tmp_path / "l.pt").scorer
        with torch.no_grad():
            shared = known.pair_features(torch.tensor(pairs))
            expected = scorer(*torch.tensor(h[pairs]).unbind(1), shared)
    assert np.allclose(np.load(tmp_path / "s.npy"), expected, atol=1e-5)
    listed = f"--predict {tmp_path}/r.csv --top 2 --edge-split none"
    assert _code(again, listed, f"--log {tmp_path}/again") == 0
    table = np.loadtxt(tmp_path / "r.csv", delimiter=",", skiprows=1)
    assert np.array_equal(table[:, 0], np.repeat(np.arange(1000), 2))
    assert 0 < scores["test"]["MAP@10"] < scores["test"]["Recall@10"]
    # all edges carry messages
    assert _code(again, f"--edge-split none --predict {tmp_path}/all.npy") == 0
    every = np.load(tmp_path / "all.npy")
    assert not np.allclose(every, h)
    if not own:
        net = checkpoint.load_model(tmp_path / "l.pt")
        exact = inference(net, graph.indptr, graph.indices, graph.features)
        assert np.allclose(exact, every, atol=1e-4)
    np.save(tmp_path / "pairs.npy", pairs + 990)
    _stops(capsys, r"--pairs .*: node ids lie in \[0, 1000\)", again, scored)


def test_threads_that_end_keep_no_memory_of_paths():
    """Each epoch draws its pairs on threads of its own."""
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096  # noqa: E731
    V = 1 << 20
    first = torch.arange(1, V // 128 + 1)
    sources = torch.cat([first, torch.arange(V)]).int()  # 0 <- 8,192 nodes <- 128 each, all nodes
    degree = torch.zeros(V, dtype=torch.int64)
    degree[0] = len(first)
    degree[first] = 128
    indptr = prefix_sum(degree)
    counted = paths.Paths(edge_split.Edges(indptr, sources), torch.ones(V))
    assert (counted.weights == 0).nonzero().tolist() == [[0]]  # the only hub
    found = []
    for _ in range(40):
        thread = threading.Thread(target=counted.between, args=[torch.tensor([[0, 2]])])
        thread.start()
        thread.join()
        found.append(resident())
    assert found[-1] - found[15] < 12 * 8 * V  # of 24 threads; malloc keeps what some have freed


def test_defaults_of_links_yield_to_what_is_typed_and_resumed(tmp_path):
    def chosen(words):
        flags = train.parse_args(f"--task link --gpus 0 {words}".split())
        return flags.model, flags.num_layers, flags.dropout, flags.scorer

    assert chosen("") == ("gcn", 2, 0.3, "paths")
    assert chosen("--dropout 0.5 --fanout 3,3,3 --scorer dot") == ("gcn", 3, 0.5, "dot")
    # gcn knows no degrees by time, and paths no times
    for temporal in ("before", "auto"):
        assert chosen(f"--temporal {temporal}")[::3] == ("sage", "ncn")
    path = _link_graph(tmp_path).path
    words = (
        f"--dataset {path} --model sage --dropout 0.5 --scorer dot --fanout 3 --hidden 8 --epochs 1"
    )
    assert _code(f"--task link --gpus 0 {words} --checkpoint {tmp_path}/l.pt") == 0
    assert chosen(f"--resume {tmp_path}/l.pt") == ("sage", 1, 0.5, "dot")


def _bought(folder, users, items, often=0.5, full=0, names=None, **changes):
    """Make a store of users who buy items, the first `full` of them every item."""
    rng = np.random.default_rng(0)
    bought = rng.random((users, items)) < often
    bought[:full] = True
    source, destination = bought.nonzero()
    kind = "user", "buys", "item"
    sizes = {"user": users, "item": items}
    features = {name: rng.normal(size=(n, 8)).astype(np.float32) for name, n in sizes.items()}
    graph = {"edge_index": {kind: np.stack([source, destination])}, "features": features}
    changes = {name: {kind: values[: len(source)]} for name, values in changes.items()}
    graph |= {"node_names": names, **changes}
    path = build_store(folder / f"{users}-{items}", node_types=sizes, **graph)
    return GraphStore.open(path)


def test_columns_of_pairs_are_known_by_the_types_of_nodes(tmp_path):
    """In any order, where users and items have the same ids."""
    store = _bought(tmp_path, 8, 6, names={"user": range(8), "item": range(6)})
    file = tmp_path / "pairs.csv"
    headers = {"source,target": [3, 5], "user,item_id": [3, 5], "user_id,sku": [3, 5]}
    for header, ends in (headers | {"item,user_id": [5, 3], "sku,user": [5, 3]}).items():
        file.write_text(f"{header}\n3,5\n")
        assert graph_tables.pairs_of_table(file, store, 0).astype(int).tolist() == [ends], header
    file.write_text("user,user_id\n3,5\n")
    _refuses(
        "user, user_id: call one source, one destination",
        graph_tables.pairs_of_table,
        file,
        store,
        0,
    )


@pytest.mark.parametrize("kind", ["small", "large", "timed"])
@pytest.mark.parametrize("full", [0, 4, 20])
def test_pairs_with_nothing_to_be_ranked_against_are_left_out(full, kind, tmp_path, monkeypatch):
    """A user who bought everything: as plain Python counts, and for any number of ranks."""
    monkeypatch.setattr(ranking, "SMALL", 1 << 14 if kind == "small" else 0)
    monkeypatch.setattr(ranking, "CHUNK", 40)
    timed = kind == "timed"
    rng = np.random.default_rng(1)
    times = {"edge_time": rng.integers(0, 50, 120)} if timed else {}
    whole = _bought(tmp_path, 20, 6, 0.4, full, **times)
    graph = link.split_edges(whole, "40/20/40", timed=timed)
    evaluation = link.Evaluation(graph, k=3)
    known = set(_pairs_of(whole))
    bought = collections.Counter(u for u, _ in known)
    for part in ("valid", "test"):
        pairs = _tuples(graph.pairs[part])
        free = [[w for w in range(20, 26) if (u, w) not in known] for u, _ in pairs]
        left = [bought[u] < 6 for u, _ in pairs]
        examples = evaluation.examples[part]
        assert examples.ranked.tolist() == left == [bool(some) for some in free]
        nodes = examples.nodes if timed else torch.arange(26)
        h = torch.randn(len(nodes), 6).double()
        places, random, others = examples.pairs, examples.random, examples.others
        if timed:  # an embedding is of a node at a time
            when = graph.pair_times[part].unsqueeze(1)
            assert all((examples.times[of] == when).all() for of in (places, random, others))
            assert torch.equal(nodes[places], graph.pairs[part])
            assert len({*zip(nodes.tolist(), examples.times.tolist())}) == len(nodes)
        against = free if others is None else others.tolist()
        against = [some if kept else [] for some, kept in zip(against, left)]
        for some, all_free in zip(against, free):
            assert {*(some if others is None else nodes[some].tolist())} <= {*all_free}
        logit = lambda _, u, v: (h[u] @ h[v]).item()  # noqa: E731
        found = evaluation(link.Scorer("dot", 6), h, part)
        if not any(left):
            assert [found[name] for name in metrics.metrics_with("from_ranks")] == [None] * 3
            assert 0 <= found["roc_auc"] <= 1
            continue
        expected = _expected(logit, _tuples(places), against, random.tolist())
        assert expected == {name: pytest.approx(found[name]) for name in expected}
    if not timed:
        _check_best(evaluation, link.Scorer("dot", 6), h, logit, known, 20)
    monkeypatch.setattr(ranking, "MOST_TIMED", 7)
    few = link.Evaluation(graph).examples["test"]
    if timed:
        spread = torch.arange(7) * len(pairs) // 7  # of all times
        assert torch.equal(few.nodes[few.pairs], graph.pairs["test"][spread])


def test_nothing_is_without_negatives_but_what_has_an_edge_to_every_node(monkeypatch):
    """Also with repeated edges, self-loops and types of a single node, in chunks."""
    monkeypatch.setattr(ranking, "CHUNK", 5)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        counts = rng.integers(1, 5, 1 + seed % 3).tolist()
        nodes = sum(counts)
        ends = torch.from_numpy(rng.integers(0, nodes, (2, int(rng.integers(0, 4 * nodes)))))
        edges = link.Edges(*from_edge_index(ends, nodes))
        pairs = torch.from_numpy(rng.integers(0, nodes, (40, 2)))
        there = {*_tuples(ends.T)} | {(u, u) for u in range(nodes)}
        kinds = np.repeat(np.arange(len(counts)), counts)
        expected = [
            all((u, w) in there for w in np.flatnonzero(kinds == kinds[v]).tolist())
            for u, v in pairs.tolist()
        ]
        assert link.Negatives(edges, nodes, counts=counts).without(pairs).tolist() == expected


def test_a_ranking_of_nothing_chooses_no_epoch(tmp_path, capsys):
    """Links to a type of one node."""
    words = f"{LINK} --dataset {_bought(tmp_path, 40, 1, 1).path} --epochs 2"
    log = tmp_path / "log"
    assert _code(words, f"--log {log}") == 0
    out = capsys.readouterr().out
    line = "the source of 4 of 4 valid and 4 of 4 test pairs has an edge to every node of the type"
    assert f"ranks   {line}: MRR and Hits leave these pairs out" in out
    assert len(re.findall("valid +MRR n/a", out)) == 3 and "test   MRR n/a  Hits@1 n/a" in out
    scores = _log(log)[-1]["scores"]["test"]
    assert scores["mrr"] is None and 0 <= scores["roc_auc"] <= 1
    for flag in ("--early-stop 1", "--weights best", "--weights best --metric hits@10"):
        assert _code(words, flag) == 2
        said = "goes by validation .*, and .* has no validation edges to compute it from"
        assert re.search(said, capsys.readouterr().err)
    assert _code(words, "--early-stop 1 --metric roc_auc") == 0


def test_link_task_says_which_part_of_its_split_is_empty(tmp_path, capsys):
    words = f"{LINK} --dataset {_link_graph(tmp_path).path} --epochs 1"
    empty_parts = {"90/0/10": ["valid"], "90/10/0": ["test"], "80/10/10": [], "none": []}
    for split, empty in empty_parts.items():
        assert _code(words, f"--edge-split {split}") == 0
        assert re.findall("split   it has no (.*) edges", capsys.readouterr().out) == empty
