"""Tests: loader.py."""

import functools
import itertools
import json
import re
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import ddp
import loader
import train
from disk import convert
from extras.graph_store import GraphDataset, build_graphs
from extras.graphs import GraphLoader
from features import FeatureRing, prefetch
from inference import inference
from model import SAGE
from run import kinds
from run.checkpoint import digests
from run.run import open_run
from sampler import NeighborSampler
from store import GraphStore, build_store
from tests.common import _as_lists, _graph, _random_graph
from tests.stores import _edge_forms, _forms, _graphs, _refuses


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint64])
def test_loader_from_edge_index_is_a_stable_list_of_neighbours(dtype):
    rng = np.random.default_rng(3)
    for V, M in ((1, 0), (1, 3), (50, 400), (50, 0)):
        edge_index = torch.from_numpy(rng.integers(0, V, (2, M))).to(dtype)
        lists = [sorted(u for u, v in edge_index.T.tolist() if v == node) for node in range(V)]
        *csc, order = loader.from_edge_index(edge_index, V, edge_order=True)
        indptr, indices = csc
        assert (indptr.dtype, indices.dtype) == (torch.int64, torch.int32)
        assert indptr[-1] == M == indices.numel()
        assert [indices[a:b].tolist() for a, b in itertools.pairwise(indptr.tolist())] == lists
        source, destination = edge_index.long()
        assert torch.equal(order, (destination * V + source).argsort(stable=True))
        for form in _edge_forms(edge_index.numpy(), V) if dtype == torch.int64 and M != 3 else ():
            assert all(map(torch.equal, loader.from_edge_index(form, V), csc))
    for bad, words in (
        (torch.zeros(3, 2).long(), r"\[3, 2\]: \[2, M\] is needed"),
        (torch.ones(2, 3), "float32"),
        (torch.tensor([[0, 50], [1, 2]]), "edge_index.0, 1. is 50: nodes lie in .0, 50"),
        (torch.tensor([[0, 1], [-1, 2]]), "edge_index.1, 0. is -1: nodes lie in"),
    ):
        _refuses(words, loader.from_edge_index, bad, 50, error=ValueError)


def _loaded(batches):
    whole = lambda b: (b.step, b.global_step, b.total, b.last, b.seeds.tolist())  # noqa: E731
    return [(*whole(b), b.x.tolist(), b.y.tolist(), _as_lists(b.blocks)) for b in batches]


def _for_loading():
    indptr, indices = _random_graph(np.random.default_rng(21), 300, 6)
    graph = loader.Graph(indptr, indices, torch.randn(300, 5), torch.arange(300) % 7)
    return graph, torch.randperm(300)[:217]


def test_loader_covers_each_epoch_once_whatever_prepares_it():
    """For any depth and number of threads; splitting a step over processes and passes keeps its seeds."""
    graph, seeds = _for_loading()
    plain = NeighborSampler(graph.indptr, graph.indices, [4, 2], seed=9)
    make = functools.partial(loader.NodeLoader, graph, seeds, [4, 2], seed=np.int64(9))
    got = []
    for depth, threads in ((0, 1), (2, 1), (3, 2)):
        batches = make(batch_size=60, depth=depth, threads=threads, reuse=depth > 1)
        got.append([_loaded(batches), _loaded(batches)])
        assert len(batches) == 4 and batches.epoch == 2
    expected = got[0]
    assert got == [expected] * 3
    for epoch, batches in enumerate(expected):
        assert sorted(sum((b[4] for b in batches), [])) == sorted(seeds.tolist())
        whole = [(i, 4 * epoch + i, n, True) for i, n in enumerate((60, 60, 60, 37))]
        assert [b[:4] for b in batches] == whole
        for _, key, _, _, ids, x, y, blocks in batches:
            law = plain.sample(torch.tensor(ids), key)
            assert _as_lists(law) == blocks
            assert x == graph.features[law[0].src_nodes.long()].tolist()
            assert y == graph.labels[ids].tolist()
    steps = [b[4] for b in expected[0]]
    assert steps[0] != expected[1][0][4]
    for world, accumulate in ((2, 1), (3, 1), (1, 3), (2, 3)):
        options = dict(batch_size=60 // (world * accumulate), accumulate=accumulate, world=world)
        ranks = (make(rank=rank, **options) for rank in range(world))
        parts = [[] for _ in steps]
        for i, batches in enumerate(zip(*ranks, strict=True)):
            for batch in batches:
                assert batch.total == len(steps[batch.step])
                assert batch.last == (i % accumulate == accumulate - 1)
                parts[batch.step] += batch.seeds.tolist()
        assert parts == steps


def test_loader_goes_on_where_another_one_stood():
    graph, seeds = _for_loading()
    options = dict(seeds=seeds, fanouts=[4, 2], batch_size=20, seed=1)
    make = functools.partial(loader.NodeLoader, graph, **options)
    whole = make()
    straight = [_loaded(whole) for _ in range(3)]
    for stop in (0, 1, 5, 10, 11):  # 0: never
        first, later = make(depth=3), make(depth=0)
        list(first)
        for i, _ in enumerate(first, 1):
            if i == stop:
                break
        later.load_state_dict(json.loads(json.dumps(first.state_dict())))
        # after its last batch the next epoch follows, whether or not the loop was left
        done, epoch = stop % 11, 1 + (stop in (0, 11))
        assert _loaded(later) == straight[epoch][done:] and later.epoch == epoch + 1
        assert _loaded(first) == straight[epoch][done:]  # so does the loop that was left
    first.seeds = seeds[:50]
    assert len(first) == 3 and len(_loaded(first)) == 3
    for batch in (halves := make(batch_size=10, accumulate=2)):  # a step is done with its last part
        assert halves.step == (batch.step + batch.last) % halves.steps
    halfway = make()
    next(itertools.islice(halfway, 3, None))
    two = [make(batch_size=10, rank=rank, world=2) for rank in range(2)]
    for part in two:
        part.load_state_dict(halfway.state_dict())
    together = [a.seeds.tolist() + b.seeds.tolist() for a, b in zip(*two)]
    assert together == [b[4] for b in straight[0][4:]]
    for other, words in (
        (make(seed=2), "seed 1, this loader has 2"),
        (make(batch_size=21), "total_batch 20, this loader has 21"),
        (make(seeds=seeds[1:]), "seeds 217, this loader has 216"),
    ):
        _refuses(words, other.load_state_dict, whole.state_dict(), error=ValueError)


def test_graph_loader_hands_out_graphs_with_their_ids(tmp_path):
    graphs = GraphDataset.open(build_graphs(tmp_path / "g", [_graphs(40)]))
    batches = GraphLoader(graphs, "train", batch_size=5, seed=1)
    orders = [[ids.tolist() for _, ids in batches] for _ in range(2)]
    assert orders[0] != orders[1] and [len(order) for order in orders] == 2 * [len(batches)]
    assert all(sorted(sum(order, [])) == graphs.split["train"].tolist() for order in orders)
    for graph, ids in batches:
        for got, stored in zip(graph, graphs.batch(ids)):
            assert torch.equal(got, stored)
        assert torch.equal(*graph.graph_ids[graph.edge_index])
        degrees = graph.edge_index[1].bincount(minlength=len(graph.x))
        assert torch.equal(degrees, graph.indptr.diff())
    mask = torch.arange(40) % 3 == 0
    in_order = GraphLoader(graphs, mask, batch_size=8, shuffle=False)
    assert [ids.tolist()[0] for _, ids in in_order] == [0, 24] and "GraphLoader(" in repr(in_order)
    assert sum(len(ids) for _, ids in GraphLoader(graphs)) == 40
    _refuses("the parts are train, valid, test", GraphLoader, graphs, "tran", error=ValueError)
    _refuses(r"a mask, has shape \[39\]: \[40\]", GraphLoader, graphs, mask[1:])


@pytest.mark.parametrize("seed", range(8))
def test_passes_within_limits_take_as_many_examples_as_fit(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 60))
    sizes = torch.from_numpy(random.integers(0, 9, (count, 2)))
    most = torch.from_numpy(random.integers(9, 30, 2))
    size = int(random.choice([3, 1000]))
    seeds = torch.arange(count)[torch.from_numpy(random.random(count) < 0.9)]
    numbers = []

    def passes(epoch, step=0, **options):
        given = dict(batch_size=size, seed=seed, load_batch=lambda part, slot: part, depth=0)
        of = loader.NodeLoader(
            None, seeds, [], limits=loader.Limits(sizes, (*most.tolist(),)), **given, **options
        )
        of.epoch, of.step = epoch, step
        return [*of]

    for epoch in range(3):
        batches = passes(epoch)
        examples = [batch.seeds.tolist() for batch in batches]
        by_hand = [[]]
        for i in sum(examples, []):
            fits = (sizes[[*by_hand[-1], i]].sum(0) <= most).all() and len(by_hand[-1]) < size
            by_hand[-1].append(i) if fits or not by_hand[-1] else by_hand.append([i])
        assert examples == (by_hand if len(seeds) else [])
        assert sorted(sum(examples, [])) == seeds.tolist()
        numbers += [batch.global_step for batch in batches]
        # as many passes a step, whoever takes them
        ranks = [passes(epoch, world=2, rank=rank, accumulate=2) for rank in range(2)]
        assert len(ranks[0]) == len(ranks[1]) == -(-len(batches) // 4) * 2
        shared = [batch for pair in zip(*ranks) for batch in pair]
        assert [b.seeds.tolist() for b in shared if len(b.seeds)] == examples
        for step in range(len(shared) // 4):
            step_batches = [b for b in shared if b.step == step]
            assert {b.total for b in step_batches} == {sum(len(b.seeds) for b in step_batches)}
        half = len(batches) // 2
        assert [batch.seeds.tolist() for batch in passes(epoch, half)] == examples[half:]
    assert numbers == [*range(len(numbers))]


@pytest.mark.parametrize("shuffle", [True, False])
def test_loader_refuses_a_second_loop_while_one_is_open(shuffle):
    """Two loops would share out the epoch: a measurement inside a loop would see half of the seeds, in silence."""
    graph, seeds = _for_loading()
    options = dict(batch_size=20, shuffle=shuffle)
    make = functools.partial(loader.NodeLoader, graph, seeds, [4, 2], **options)
    whole, batches, seen = [b.seeds.tolist() for b in make()], make(), []
    words = "another loop over this NodeLoader has not ended: make another NodeLoader, or close()"
    refuses_another = functools.partial(_refuses, re.escape(words), error=RuntimeError)
    for batch in batches:
        if not seen:  # once: a refusal collects garbage, which takes long
            refuses_another(list, batches)
            with ThreadPoolExecutor(1) as pool:
                refuses_another(pool.submit(list, batches).result)
        seen.append(batch.seeds.tolist())
    assert seen == whole and batches.epoch == 1  # the first loop has lost nothing
    refuses_another(list, zip(batches, batches))
    assert len(list(zip(make(), make()))) == len(whole)
    held = iter(batches)  # after a zip that failed too
    assert next(held) is not None
    held.close()
    assert len(list(batches)) == len(whole) - 2 * shuffle


def test_loader_begins_another_loop_after_one_that_an_exception_left():
    """Also while a traceback keeps its frames, as in a notebook, or a reference cycle keeps its iterator."""
    graph, seeds = _for_loading()
    batches, kept = loader.NodeLoader(graph, seeds, [4, 2], batch_size=20), []

    def train(start):
        for i, _ in enumerate(start(batches)):
            if i == 2:
                raise KeyError("of the loop's body")

    for start in (
        iter,
        lambda batches: (b for b in batches),
        lambda batches: zip(batches, batches.seeds),
    ):
        try:
            train(start)
        except KeyError as error:
            kept.append(error)
    assert len(kept) == 3 and batches.step == 9
    cycle = [iter(batches)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    assert len(list(batches)) == 1
    batches.draw = lambda part: 1 // 0  # on a thread of the loader
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            list(batches)
    waiting = iter(batches)  # has not begun
    batches.draw = None
    assert len(list(batches)) == 11 == len(list(waiting))


def test_loader_takes_features_that_are_trained_as_they_are_after_each_step():
    """Rows fetched ahead would be those of earlier steps, how many of them by chance."""
    graph, seeds = _for_loading()
    table = torch.zeros(300, 5, requires_grad=True)
    for batch in loader.NodeLoader(graph._replace(features=table), seeds, [4, 2], batch_size=20):
        assert torch.equal(batch.x, table[batch.blocks[0].src_nodes])
        batch.x.sum().backward()
        with torch.no_grad():
            table -= table.grad


def test_loader_batches_may_be_kept_unless_their_buffers_are_reused():
    graph, seeds = _for_loading()
    single, double, x = torch.float32, torch.float64, graph.features
    for dtype, rows in ((single, x), (double, x.double()), (single, x.half())):
        options = dict(batch_size=20, dtype=dtype)
        batches = loader.NodeLoader(graph._replace(features=rows), seeds, [4, 2], **options)
        for b in list(batches):
            assert torch.equal(b.x, rows[b.blocks[0].src_nodes.long()].to(dtype))
            assert b.x.dtype == dtype
    reused = list(loader.NodeLoader(graph, seeds, [4, 2], batch_size=20, reuse=True))
    assert len({batch.x.data_ptr() for batch in reused}) == 3


def test_loader_in_order_draws_the_same_in_each_epoch_and_takes_masks():
    """Also after a loop that was left, as after Lightning's sanity check of a validation loader."""
    graph, _ = _for_loading()
    mask = torch.rand(300) < 0.5
    batches = loader.NodeLoader(graph, mask, [4, 2], batch_size=64, shuffle=False)
    once = _loaded(batches)
    assert sum((b[4] for b in once), []) == mask.nonzero().flatten().tolist()
    for _ in range(2):
        next(itertools.islice(batches, 1, None))
    state = batches.state_dict()
    assert once == _loaded(batches) and state["step"] == 2
    batches.load_state_dict(state)  # resumed, training in order goes on in mid-epoch
    assert next(iter(batches)).step == 2
    assert _loaded(batches) == once
    # Lightning takes a loader with a `sampler` for torch's and asks it for more
    assert not hasattr(batches, "sampler")


def test_loader_says_what_does_not_fit_the_graph():
    indptr, indices = loader.from_edge_index([[0, 1, 2], [1, 2, 0]], 3)
    good = loader.Graph(indptr, indices, torch.ones(3, 2), torch.arange(3))
    mask = torch.ones(4, dtype=torch.bool)
    data = types.SimpleNamespace(x=good.features, edge_index=torch.tensor([[0], [1]]))
    form = r"Graph\(\*from_edge_index\(data.edge_index, len\(data.x\)\), data.x, data.y\)"
    for words, options in {
        r"seeds, a mask, has shape \[4\]: \[3\] is needed": {"seeds": mask},
        r"seeds has shape \[2, 1\]: \[n\] is needed": {"seeds": [[0], [1]]},
        "seeds is None: an array is needed": {"seeds": None},
        r"features has shape \[4, 2\]: \[3, F\] is": {"features": np.ones((4, 2))},
        r"features has shape \[3\]: \[3, F\] is needed": {"features": torch.ones(3)},
        "labels is None: an array is needed": {"labels": None},
        "features is a dict: an array is needed": {"features": {}},
        f"graph is a SimpleNamespace: .*{form}": {"graph": data},
        "graph is a str: ": {"graph": "my_store"},
        "edge_features is None: an array is needed": {"edges": True},
        "batch_size is 0": {"batch_size": 0},
        "world is 2: at least 3 is needed": {"rank": 2, "world": 2},
        "fanouts by type need edge_type": {"fanouts": [[3, 3]]},
        "fanouts is 10: a list of whole numbers": {"fanouts": 10},
        "device is cuda: torch sees no CUDA GPU here; give dev": {"device": "cuda"},
    }.items():
        changed = {name: options.pop(name) for name in ("features", "labels") if name in options}
        options = {"graph": good._replace(**changed), "seeds": [0], "fanouts": [2], **options}
        error = TypeError if options["fanouts"] == 10 else ValueError
        _refuses(words, loader.NodeLoader, **options, error=error)
    batch = next(iter(loader.NodeLoader(good, [0, 2], [2])))
    said = "there are 1 blocks for 2 layers: one a layer"
    _refuses(said, SAGE(2, 4, 3, num_layers=2), batch.blocks, batch.x, error=ValueError)
    net = SAGE(2, 4, 3, num_layers=1)
    for words, x in (
        ("x has 2 rows, indptr is of 3 nodes", good.features[:2]),
        (r"x is a .*: a dense tensor or array \[V, F\] is", good.features.to_sparse()),
        (r"x is a .*: a dense tensor or array \[V, F\] is", good.features.tolist()),
    ):
        _refuses(words, inference, net, indptr, indices, x, error=ValueError)
    expected = inference(net, indptr, indices, good.features)
    arrays = (x.numpy() for x in (indptr, indices, good.features))
    assert torch.equal(inference(net, *arrays), expected)


def test_graph_batch_and_loader_are_shown_by_their_shapes():
    graph, _ = _for_loading()
    batches = loader.NodeLoader(graph, [0, 2], [1, 2], batch_size=1)
    batch = next(iter(batches))
    for one, shown in (
        (graph._replace(labels=[0] * 90), "features=[300, 5], labels=[90])"),
        (
            batch,
            f"num_edges={batch.blocks[1].num_edges})], x=[{len(batch.x)}, 5], y=[1], seeds=[1])",
        ),
        (batch._replace(blocks=[], x=None), "Batch(blocks=[], x=None, y=[1], seeds=[1])"),
        (batches, "(seeds=[2], fanouts=[1, 2], total_batch=1, steps=2, epoch=0, step=1)"),
    ):
        assert repr(one).endswith(shown)


def test_loader_takes_arrays_in_the_forms_that_people_have_them_in():
    graph, _ = _for_loading()
    graph, seeds = graph._replace(indptr=graph.indptr.int()), np.arange(3, 40)
    load = lambda graph, seeds: _loaded(loader.NodeLoader(graph, seeds, [4]))  # noqa: E731
    expected = load(graph, seeds)
    for name in "indptr", "indices", "features", "labels":
        for i, form in enumerate(_forms(getattr(graph, name).numpy())):
            assert load(graph._replace(**{name: form}), seeds) == expected, (name, i)
    for form in [*_forms(seeds), seeds.astype(np.uint16)]:
        assert load(graph, form) == expected
    labels = graph.labels.numpy()
    assert load(graph._replace(labels=labels.astype(np.uint64)), seeds) == expected
    for said, change, ids in (
        (r"labels holds objects of Python \(int\): give", {"labels": labels.astype(object)}, seeds),
        ("labels has dtype <U1: numbers are", {"labels": labels.astype(str)}, seeds),
        ("seeds has dtype float64: integers are needed", {}, seeds * 1.0),
    ):
        _refuses(said, loader.NodeLoader, graph._replace(**change), ids, [4], error=ValueError)


def test_loader_takes_repeated_seeds_where_a_draw_makes_them_distinct():
    """Otherwise they are refused, also where they are set later."""
    graph, seeds = _for_loading()
    make = functools.partial(loader.NodeLoader, graph, fanouts=[4], batch_size=16)
    later = functools.partial(setattr, make(seeds), "seeds")
    for bad in ([7, 7], [3, 2, 1, 3], seeds.tolist() + [int(seeds[99])]):
        said = rf"node {bad[-1]} more than once: .*unique\(return_inverse=True\)"
        for change in (make, later):
            _refuses(said, change, torch.tensor(bad), error=ValueError)

    def draw(batch):
        nodes, y = batch.seeds.unique(return_inverse=True)
        return nodes, {}, y

    some = torch.randint(0, 9, (50,))
    for batch in make(some, draw=draw):
        assert torch.equal(batch.blocks[-1].src_nodes[batch.y].long(), batch.seeds)
    make(some, load_batch=draw)


def test_loader_hands_out_labels_of_any_dtype_and_shape():
    graph, seeds = _for_loading()
    for labels in (torch.rand(300), torch.rand(300, 2, dtype=torch.float64)):
        batch = next(iter(loader.NodeLoader(graph._replace(labels=labels), seeds, [4])))
        assert torch.equal(batch.y, labels[batch.seeds])


def test_loader_brings_the_features_of_edges():
    graph, seeds = _for_loading()
    e = np.random.default_rng(0).random((len(graph.indices), 3))
    graph = types.SimpleNamespace(**graph._asdict(), edge_features=e)
    changes = {}, {"reuse": True}, {"depth": 0, "dtype": torch.float64}, {"threads": 3, "depth": 4}
    for options in changes:
        dtype = options.get("dtype", torch.float32)
        for batch in loader.NodeLoader(graph, seeds, [4, 2], batch_size=50, edges=True, **options):
            for rows, block in zip(batch.edges, batch.blocks, strict=True):
                assert torch.equal(rows, torch.from_numpy(e)[block.edge_ids].to(dtype))


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_loader_leaves_data_in_host_memory_whatever_the_default_device(backend, tmp_path):
    """After torch.set_default_device("cuda") too: stores, loaders and predictions are made and used."""
    seeds, net, given = torch.arange(60), SAGE(5, 8, 7, num_layers=2), _graph(60, 400, classes=7)
    with torch.device("meta"):
        graph = GraphStore.open(build_store(tmp_path / "g", **given, backend=backend))
        rows = graph.features.gather(seeds)
        if backend == "mmap" and (reader := graph.features.reader()):
            assert torch.equal(reader.read(seeds, rows.clone()), rows)
        graph_of = functools.partial(loader.Graph, features=rows.numpy(), labels=given["labels"])
        for one in (graph, graph_of(*loader.from_edge_index(given["edge_index"].tolist(), 60))):
            for options in ({}, {"depth": 0, "reuse": True}):
                for batch in loader.NodeLoader(one, seeds.tolist(), [4, 2], **options):
                    net(batch.blocks, batch.x).sum().backward()
            logits = inference(net, one.indptr, one.indices, one.features)
            assert logits.device.type == "cpu" and logits.isfinite().all()


def test_ring_with_too_few_slots_says_how_many():
    graph, seeds = _for_loading()
    sample = NeighborSampler(graph.indptr, graph.indices, [2]).sample
    for reuse in (True, False):
        ring = FeatureRing(graph.features, graph.labels, slots=2, reuse=reuse)
        load = lambda ids, slot: ring.fetch(slot, sample(ids, 0))  # noqa: E731
        with pytest.raises(ValueError, match=r"slot 2 of a ring with slots=2.*here 3 or more"):
            list(prefetch(load, seeds.split(20), depth=2))


DTYPES_OF_FEATURES = "float32 float16 bfloat16 float64 uint8 int8 int16 int32 int64".split()


@pytest.mark.parametrize("dtype", DTYPES_OF_FEATURES)
def test_features_of_every_dtype_train_in_every_model_at_every_precision(dtype, tmp_path):
    """One step by train.py's own functions gives what float32 features give, without warnings."""
    assert convert.DTYPES == tuple(DTYPES_OF_FEATURES)
    table = torch.randint(0, 5, (60, 5)).to(getattr(torch, dtype))
    graph, paths = _graph(num_nodes=60, num_edges=400), [tmp_path / "plain", tmp_path / "typed"]
    for path, rows in zip(paths, (table.float(), table)):
        backend = {"backend": "lmdb"} if (path.name, dtype) == ("typed", "float32") else {}
        build_store(path, **{**graph, **backend, "features": rows})
    turn = DTYPES_OF_FEATURES.index(dtype)
    precisions = ("fp32", "bf16", "fp64")
    for number, conv in enumerate(
        kinds.plain_layers()
    ):  # each meets each precision with three of the types
        precision, outputs = precisions[(number + turn) % 3], []
        words = f"--model {conv} --precision {precision} --fanout 3,3 --hidden 8 --dropout 0"
        for path in paths:
            args = train.parse_args([*words.split(), "--dataset", str(path)])
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                run = open_run(ddp.Ranks(), args, path)
                (batch,) = run.loader(run.store.split["train"])
                outputs.append(run.forward(batch))
                torch.nn.functional.cross_entropy(outputs[-1], batch.y).backward()
                assert run.exact().isfinite().all()
                if precision != "bf16":  # from Python, rows as they are
                    rows = run.store.features.gather(batch.blocks[0].src_nodes)
                    assert run.model.eval()(batch.blocks, rows).isfinite().all()
            gradients = [p.grad for p in run.model.parameters()]
            assert all(g is not None and g.isfinite().all() for g in gradients)
        assert torch.equal(*outputs) or precision == "bf16"
        torch.testing.assert_close(*outputs, rtol=0.05, atol=0.05)


def _coded(tmp_path, graph, **options):
    """Build a store with features in codes of 8 bits, and one of what these stand for -> (store, store)."""
    path = build_store(tmp_path / "coded", **graph, feature_dtype="int8", **options)
    coded = GraphStore.open(path)
    rows = {"features": coded.features[:].numpy()}
    return coded, GraphStore.open(build_store(tmp_path / "plain", **{**graph, **rows}))


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_features_in_codes_train_as_the_rows_that_they_stand_for(tmp_path, backend):
    """With train.py, also behind a cache and in another order of columns, and from Python; in batches and exactly."""
    graph = {**_graph(num_nodes=60, num_edges=400), "feature_names": [*"abcde"]}
    stores = _coded(tmp_path, graph, backend=backend)
    words = "--fanout 3,3 --hidden 8 --dropout 0 --gpus 0 --prefetch 0"
    for conv in ("gcn", "sage"):
        found = []
        for store, cache in itertools.product(stores, ("", "--cache 200", "--cache 1MB")):
            more = f"{words} --model {conv} {cache} --dataset {store.path}"
            run = open_run(ddp.Ranks(), train.parse_args(more.split()), store.path)
            (batch,) = run.loader(run.store.split["train"])
            found.append((run.forward(batch), run.sampled(torch.arange(60)), run.exact()))
        for other in found[1:]:
            for a, b in zip(found[0], other):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    loaders = (loader.NodeLoader(s, s.split["train"], [3, 3], seed=1) for s in stores)
    for batches in zip(*loaders, strict=True):
        assert torch.equal(*(batch.x for batch in batches))
    net = SAGE(5, 8, 4)
    assert torch.equal(*(inference(net, s.indptr, s.indices, s.features) for s in stores))
    graph["features"] = 2 * graph["features"]  # the same codes
    double = GraphStore.open(build_store(tmp_path / "double", **graph, feature_dtype="int8"))
    differ = {*digests(double).items()} ^ {*digests(stores[0]).items()}
    assert len(differ) == (2 if backend == "mmap" else 4)
    for s in stores:
        s.take_columns([*"edcba"])
    assert torch.equal(*(s.features.gather(torch.arange(60)) for s in stores))
