"""Link prediction: edges as examples, their losses and the task. Negatives, scorers and evaluation are those of
extras/ranking.py.

    graph = split_edges(store, "85/5/10", seed=0)      # messages go along training edges; graph.pairs: of each part
    links = Links(graph, graph.indptr, graph.indices, negatives=1, seed=0)
    net.scorer = Scorer("dot", width)
    for batch in NodeLoader(graph, graph.split["train"], [10, 10], sampler=..., ring=..., draw=links.draw):
        loss = links.loss(net.scorer, net(batch.blocks, batch.x), batch.y)
    figures = Evaluation(graph)(net.scorer, embeddings, "test")     # MRR, Hits@K, ROC-AUC, average precision

    python train.py --task link --dataset cora

A positive is a pair of nodes with an edge from the first to the second; an edge and its reverse are one pair, in one part
of the split. A step samples the union of the ends of its pairs once; the edges of its positives and their reverses carry
no messages, or a positive could be read off its own edge. Draws depend only on the seed, the step and the pair's number.
With times, both ends of a pair and its negatives see the edges up to the time of the pair.

P pairs of a batch have K negatives each; D is the width of an embedding.
"""

import numpy as np
import torch
from torch.nn import functional as F

from disk.columns import NAMES, types_called
from disk.files import StoreError, plural, reading, sha256_of
from extras import extra
from extras.common_neighbours import CommonNeighbours
from extras.edge_split import (
    HELD_OUT,
    Edges,
    checked_pairs,
    counts_of,
    split_edges,
    split_type,
    there_since,
    view_of,
)
from extras.ranking import COLUMNS, Evaluation, Negatives, Scorer, at_times, distinct
from extras.times import edge_times
from sampler import mix
from sources.splits import say_empty_parts
from tasks.metrics import METRICS, metrics_with
from tasks.task import (
    CHUNK,
    Task,
    as_stored,
    described,
    gnn,
    node_columns,
    numbered_columns,
    open_graph,
    rows_of_nodes,
)

# ---- training


class Links:
    """Training pairs as the examples of a `NodeLoader`: draws the nodes to sample for a batch, and computes the loss.

    graph: of `split_edges`. indptr, indices: its edges that carry messages, on the sampler's device. negatives: K per
    pair, drawn by `seed`; by_degree: in proportion to degree^0.75; checked: avoid the edges that carry messages.
    softmax: the loss is the cross-entropy of a pair among its negatives, else of each logit alone. common:
    `CommonNeighbours` of the same edges, if the scorer takes what pairs have in common: `columns` of its columns, or all.
    """

    def __init__(
        self,
        graph,
        indptr,
        indices,
        *,
        negatives=1,
        seed=0,
        by_degree=False,
        checked=True,
        softmax=False,
        common=None,
        columns=None,
    ):
        self.count = negatives
        self.common = common
        self.columns = columns
        self.softmax = softmax
        # ~2 is no step: the sampler's key of a hop is mix(mix(mix(seed) ^ step) ^ hop)
        self.key = mix(mix(seed) ^ ~2)
        self.pairs = graph.pairs["train"].to(indices.device)
        times = graph.pair_times
        self.times = times and times["train"].to(indices.device)
        self.edges = common.edges if common else Edges(indptr, indices)
        self.negatives = Negatives(
            self.edges if checked else None,
            graph.num_nodes,
            indptr.diff() if by_degree else None,
            graph.node_counts,
        )

    def draw(self, batch):
        """Draw a batch, as `draw` of a `NodeLoader` whose seeds are ids of training pairs -> (nodes: distinct ends of
        the pairs and negatives; options of the sampler, which exclude the edges of the whole step's pairs; y int64
        [P, 2 + K]: positions among the nodes of each pair's source, destination and negatives; with `common` followed by
        its columns for destination and negatives, the bits of float64)."""
        seeds = self._of_pairs(batch.seeds)
        pairs = self.pairs[seeds]
        key = mix(self.key ^ (batch.global_step & (1 << 64) - 1))
        negatives, bad = self.negatives.attempts(key, seeds, pairs, self.count)
        nodes, times, y = self._ends(seeds, pairs, negatives)
        step_pairs = self.pairs[self._of_pairs(batch.step_seeds)]
        first, counts = self.edges.ranges(step_pairs)
        last = F.pad(y.flatten(), (1, 0), value=-1).amax()  # a part of a step may be empty
        # the host waits for the GPU here only
        left, last, num_edges = torch.stack([bad.sum(), last, counts.sum()]).tolist()
        if left:
            negatives = self.negatives.looked_up(pairs, negatives, bad)
            nodes, times, y = self._ends(seeds, pairs, negatives)
            last = int(y.amax())
        options = {"exclude": self.edges.listed(first, counts, num_edges)}
        if self.times is not None:
            options["times"] = times[: last + 1]
        if self.common:
            y = torch.cat([y, self._features(seeds, pairs, negatives)], 1)
        return nodes[: last + 1], options, y

    def _features(self, seeds, pairs, negatives):
        """Compute what the sources of pairs [P, 2] have in common with destinations and negatives -> int64 [P, (1 + K) columns]."""
        ends = torch.stack([pairs[:, :1].expand_as(negatives), negatives], 2)
        ends = torch.cat([pairs.unsqueeze(1), ends], 1)  # [P, 1 + K, 2]
        times = None
        if self.times is not None:
            times = self.times[seeds].repeat_interleave(ends.shape[1])
        features = self.common.pair_features(ends.view(-1, 2), times, self.columns)
        return features.double().view(torch.int64).view(len(pairs), -1)

    def _of_pairs(self, seeds):
        """Copy numbers of pairs to the device of the pairs."""
        if self.pairs.is_cuda:
            seeds = seeds.pin_memory()
        return seeds.to(self.pairs.device, non_blocking=True)

    def _ends(self, seeds, pairs, negatives):
        """Find the distinct ends of pairs [P, 2] and their negatives [P, K] -> (nodes, times or None, index of each
        [P, 2 + K]), see `at_times`."""
        nodes = torch.cat([pairs, negatives], 1)
        if self.times is None:
            nodes, y = distinct(nodes)
            return nodes, None, y
        times = self.times[seeds].unsqueeze(1).expand_as(nodes)
        return at_times(nodes, times, self.negatives.num_nodes)

    def loss(self, scorer, h, y):
        """Sum over pairs of the softmax cross-entropy, or of half the pair's binary cross-entropy plus half the mean of
        its negatives'. h: [S, D] embeddings. y: int64 [P, 2 + K], as from `draw`, rows of h; of -1: no pair."""
        y, features = y.tensor_split([2 + self.count], 1)
        if self.common:
            features = features.contiguous().view(torch.float64).view(len(y), 1 + self.count, -1)
            features = features.where(y[:, :1, None] >= 0, 0)  # -1 is NaN as a float64
        rows = y.clamp(min=0)
        source = h.index_select(0, rows[:, 0]).unsqueeze(1)  # [P, 1, D]
        others = h.index_select(0, rows[:, 1:].flatten())
        others = others.unflatten(0, (len(y), 1 + self.count))  # [P, 1 + K, D]
        logits = scorer(source, others, features)  # [P, 1 + K]
        if self.softmax:
            first = y[:, 0].clamp(max=0)
            return F.cross_entropy(logits, first, reduction="sum", ignore_index=-1)
        losses = F.softplus(-logits[:, 0]) + F.softplus(logits[:, 1:]).mean(1)
        return losses.where(y[:, 0] >= 0, 0).sum() / 2


# ---- the task


def number_of_type(store, name):
    """Look up the number of the edge type that --edge-type names; StoreError unless there is exactly one."""
    if store.edge_type is None:
        raise StoreError(f"--edge-type {name}: the edges of {store.path} have no types")
    names = store.edge_types or [*map(str, range(store.num_edge_types))]
    numbers = types_called(name, names)
    if len(numbers) != 1:
        raise StoreError(
            f"--edge-type {name}: "
            f"there is {'more than one' if numbers else 'none'} among {'; '.join(names)}"
        )
    return numbers[0]


def joined_to_scorer(network, _, output):
    """Add 0 times the scorer's parameters: DistributedDataParallel takes those that a network's output does not depend
    on for unused, and fails when the loss uses them."""
    if not isinstance(output, torch.Tensor):
        return output  # refused by `output_of_own`
    return output + 0 * sum(p.sum() for p in network.scorer.parameters())


def columns_of(flags):
    """Return how many columns of `CommonNeighbours` the scorer takes: with times also those of the destination."""
    count = COLUMNS.get(flags.scorer, 0)
    return count + 2 if count and flags.temporal != "off" else count


class LinkTask(Task):
    """Link prediction: learn embeddings of nodes from which a scorer tells edges from other pairs."""

    name = "link"
    examples = "edges"
    are_links = True
    padded = True
    told_by = "indptr.", "indices."
    metrics = metrics_with("from_ranks") + metrics_with("from_scores")
    widths = "feature_dim", "edge_dim", "num_edge_types", "node_types"
    unused = {
        "is for --task node: --task link has --edge-split": "split",
        "is for --task node: the examples of --task link have no classes": "class_weights",
        "is for --task node: --task link writes embeddings, or scores of --pairs": "predict_what",
        "is of targets of nodes and graphs": "loss",
        "is for --task node": "report",
        "is for --task node: embeddings of --task link are those at the end of time": "window",
    }

    def __init__(self, args, path, say=print):
        store = open_graph(args, path, say)
        edge_type = None if args.edge_type is None else number_of_type(store, args.edge_type)
        file = args.edge_split if args.edge_split.endswith(".npz") else None
        files = store.meta["files"]
        if NAMES in files and (file or args.pairs):
            say(f"names   files of pairs hold names of nodes, those of {NAMES}")
        graph = split_edges(
            store,
            args.edge_split,
            args.seed,
            timed=args.temporal != "off",
            edge_type=edge_type,
            say=say,
        )
        if file:  # part of what identifies the data of a checkpoint
            files = {**files, file: {"bytes": 0, "sha256": sha256_of(file).hexdigest()}}
        # outputs are embeddings
        self.store = view_of(graph, meta={**store.meta, "files": files}, num_classes=args.hidden)
        if store.edge_type is not None:
            of = f"of type {args.edge_type}" if args.edge_type else "of all types, see --edge-type"
            nodes = ", negatives nodes of the destination's type" if store.node_types else ""
            say(f"links   pairs are edges {of}{nodes}")
        if args.edge_split != "none":
            say_empty_parts(self.store.split, "edges", say)
        self.metric = args.metric or self.metrics[0]
        historical = args.eval_negatives == "historical"
        self.evaluation = Evaluation(
            self.store, args.temporal == "before", historical, args.top or 10
        )
        if historical:
            say(
                "ranks   against nodes to which the source had an edge before; of fewer than 100 the others are random"
            )
        self._say_what_is_not_ranked(say)
        if args.pairs:  # refused before anything is trained
            self._read_pairs(args.pairs, edge_type, say)

    def _say_what_is_not_ranked(self, say):
        left_out = {part: ~some.ranked for part, some in self.evaluation.examples.items()}
        if any(mask.any() for mask in left_out.values()):
            every = "every node of the type" if self.store.node_types else "every node"
            say(
                f"ranks   the source of {counts_of(left_out)} pairs has an edge to {every}: "
                "MRR and Hits leave these pairs out"
            )

    def _read_pairs(self, file, edge_type, say):
        """Read the file of --pairs, an array or a table. asked: int64 [n, 2] nodes; named: [n, 2] as in the file."""
        with reading(name := f"--pairs {file}"):
            with open(file, "rb") as stream:
                is_array = stream.read(6) == b"\x93NUMPY"
            if is_array:
                pairs = np.load(file, allow_pickle=False)
            else:
                of_table = extra(".graph_tables", name).pairs_of_table
                pairs = of_table(file, self.store, edge_type, lambda line: say(f"pairs   {line}"))
            self.asked = checked_pairs(name, pairs, self.store, edge_type)
            self.named = np.char.decode(pairs, "utf-8") if pairs.dtype.kind == "S" else pairs

    @staticmethod
    def network(args, widths, custom=None):
        network = gnn(args, widths, args.hidden) if custom is None else custom
        if hasattr(network, "scorer"):
            raise StoreError(
                f"--model {args.model} has a `scorer`: --task link gives the network one of that name"
                ", rename yours"
            )
        network.add_module("scorer", Scorer(args.scorer, args.hidden, columns_of(args)))
        if custom is not None and args.scorer != "dot":  # which has no parameters
            network.register_forward_hook(joined_to_scorer)
        return network

    @staticmethod
    def defaults(flags):
        values = {"temporal": "off", "dropout": 0.3}
        if not flags.fanout:
            values["num_layers"] = 2
        if "temporal" not in flags.typed or flags.temporal == "off":  # gcn knows no degrees by time
            values["model"] = "gcn"
        else:
            values["scorer"] = "ncn"
        return values

    def seeds_per_example(self, args):
        return 2 + args.negatives

    def seeds(self):
        return torch.arange(self.store.num_nodes)

    def num_scored(self):
        if METRICS[self.metric].from_ranks:
            return int(self.evaluation.examples["valid"].ranked.sum())
        return super().num_scored()

    def attach(self, ranks, args, used, indptr, indices):
        self.links = Links(
            self.store,
            indptr,
            indices,
            negatives=args.negatives,
            seed=args.seed,
            by_degree=args.negatives_by == "degree",
            checked=not args.unchecked_negatives,
            softmax=args.link_loss == "softmax",
            common=self._common(args, indptr, indices),
            columns=columns_of(args),
        )
        self.draw = self.links.draw

    def _common(self, args, indptr, indices):
        """Return the `CommonNeighbours` for a scorer that takes columns of it, else None."""
        if not columns_of(args):
            return None
        common = self.evaluation.common
        if indices.device.type == "cpu":
            return common
        times = there_since(self.store).to(indices.device) if self.evaluation.timed else None
        return CommonNeighbours(Edges(indptr, indices), times, common.strict)

    def loss(self, network, output, y):
        return self.links.loss(network.scorer, output, y)

    def scores(self, run, part, h=None):
        """Compute the metrics of a part -> {metric: value}; None without pairs. h: exact embeddings [V, D]."""
        examples = self.evaluation.examples[part]
        if not len(examples.pairs):
            return None
        if self.evaluation.timed:
            h = run.sampled(examples.nodes, examples.times)
        elif h is None:
            h = run.exact()
        return self.evaluation(run.model.scorer, h, part, run.ranks)

    def validate(self, run):
        scores = self.scores(run, "valid")
        return {"valid": scores, **run.ring.counts()}, scores and scores[self.metric]

    def score_text(self, score):
        return f"{METRICS[self.metric].title} {score:.4f}"

    def evaluate(self, run, report):
        """Report scores and write embeddings, the best destinations (--top) or logits of --pairs -> {"part name": score}."""
        args = run.plan
        h = None if self.evaluation.timed and not args.predict else run.exact()
        scores = {part: self.scores(run, part, h) for part in HELD_OUT}
        line, baselines = self._baselines(run)
        exact = report.scores(scores, line, baselines=baselines)
        if args.predict and args.top:
            report.write(None, self.rows_of_best(run, h))
        elif args.predict and args.pairs:
            scores = self.evaluation.logits(run.model.scorer.on_host(h.dtype), h, self.asked)
            report.write(lambda: scores, self.rows_of_pairs(scores))
        elif args.predict:
            report.write(lambda: h, rows_of_nodes(self.store, h, numbered_columns))
        return exact

    def _baselines(self, run):
        """Evaluate scorers without a network on the same pairs -> (line to print, {part: {name: {metric: value}}})."""
        part = "test" if len(self.evaluation.examples["test"].pairs) else "valid"
        figures = self.evaluation.baselines(part, run.ranks)
        scores = [(name, values[self.metric]) for name, values in figures.items()]
        text = ", ".join(f"{name} {score:.4f}" for name, score in scores if score is not None)
        line = f"without a network  {part} {METRICS[self.metric].title}: {text}" if text else ""
        return line, {part: figures}

    def rows_of_best(self, run, h):
        """Yield a table of the --top best destinations of each source that are no edges of it, in chunks, {column: values}: types
        of the nodes, if they have any, their names or, without names, numbers within the type, and scores [n]. h: [V, D]."""
        names = self.store.node_names()
        names = names and as_stored(self.store, names)
        for *pairs, scores in self.evaluation.best(run.model.scorer, h, run.plan.top):
            table = {}
            for column, nodes in zip(("source", "destination"), pairs):
                nodes = nodes.numpy()  # numpy takes a tensor of one element for a number
                some = None if names is None else names[nodes]
                table |= node_columns(self.store, f"{column}_type", column, nodes, some)
            yield {**table, "score": scores.numpy()}

    def rows_of_pairs(self, scores):
        """Yield a table of --pairs in chunks, {column: values}: their nodes as in the file, and scores [n]."""
        for rows in torch.arange(len(scores)).split(CHUNK):
            source, destination = self.named[rows.numpy()].T
            yield {"source": source, "destination": destination, "score": scores[rows].numpy()}

    def lines(self, args, split, parameters):
        features, network, fanout = described(args, self.store)
        yield (
            f"data    {features}, {self.store.num_edges:,} edges carry messages; "
            f"pairs to predict: {split} (--edge-split {args.edge_split})"
        )
        how = args.negatives_by
        if args.unchecked_negatives:
            how += ", unchecked"
        yield (
            f"model   {network}, scorer {args.scorer}, {parameters}; {fanout}; "
            f"{plural(args.negatives, 'negative')} a pair ({how}), loss {args.link_loss}"
        )
        pairs = len(self.store.split["train"])
        if args.total_batch * 2 > pairs:
            yield (
                f"advice  a step leaves its own {args.total_batch:,} of {pairs:,} pairs out of the "
                "messages, so that nodes have few neighbours left: give a smaller --batch-size"
            )


TASK = LinkTask


def ranks_all(flags):
    """Refuse --top with --pairs, and without a table to write to."""
    if flags.pairs or flags.predict and flags.predict.endswith(".npy"):
        return "writes a table of all sources: give --predict FILE.csv or .parquet, and no --pairs"


def without_times(flags):
    """Refuse --scorer paths with times."""
    if flags.scorer == "paths" and flags.temporal != "off":
        return "counts edges of all times: give --scorer ncn"


def flags(kinds):
    """Declare the flags of --task link."""
    return {
        "input_dropout": dict(
            edge_split=kinds.per_graph(
                kinds.parsed_by(split_type, "A/B/C"),
                "85/5/10",
                "percent of edges for train, valid and test, drawn by --seed; time:A/B/C: by time; none: all for train; FILE.npz with valid, test [n, 2]",
                group="links",
            ),
            edge_type=kinds.per_graph(
                kinds.text("TYPE"),
                None,
                "predict edges of a type, as user,buys,item (default: all)",
            ),
            scorer=kinds.fixed(
                kinds.one_of("paths", "ncn", "dot", "distmult", "mlp"),
                "paths",
                "ncn: also by common neighbours; paths: and paths of 3 edges",
                needs=[without_times],
                default_is_off=False,
            ),
            negatives=kinds.fixed(
                kinds.COUNT, 1, "negatives per training edge, none of them an edge"
            ),
            negatives_by=kinds.fixed(
                kinds.one_of("uniform", "degree"), "uniform", "degree: in proportion to degree^0.75"
            ),
            unchecked_negatives=kinds.fixed(kinds.SWITCH, False, "negatives may be edges"),
            link_loss=kinds.fixed(
                kinds.one_of("bce", "softmax"),
                "softmax",
                "softmax: edge against its negatives; bce: each pair alone",
            ),
            eval_negatives=kinds.kept(
                kinds.one_of("random", "historical"),
                "random",
                "with times: ranked against; historical: earlier destinations",
                needs=[edge_times],
            ),
            top=kinds.free(
                kinds.COUNT,
                None,
                "--predict: best destinations of each source; also N of MAP@N, ... (default: 10)",
                needs=[ranks_all],
            ),
            pairs=kinds.free(
                kinds.text("FILE"),
                None,
                "node ids [n, 2], .npy or a table, to score",
                needs=[kinds.prediction],
            ),
        )
    }
