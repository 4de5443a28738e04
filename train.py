"""Train a graph neural network by neighbour sampling.

    python train.py                                                  # built-in synthetic graph, no download
    python train.py --dataset ogbn-products --fanout 15,10,5         # one GPU when there is one, else the CPU
    python train.py --gpus 4 --dataset ogbn-products                 # four GPUs of this machine
    python train.py --gpus 0 --procs 2 --dataset my_graph.npz        # two CPU processes
    python train.py --task link --dataset cora --model gcn           # edges: which are there that are not known
    python train.py --task graph --dataset molecules.npz             # a number for each of many small graphs
    python train.py --dataset cora --model gat --heads 8 --runs 10   # mean and standard deviation over ten seeds
    python train.py --resume run.pt --predict classes.npy            # classes of all nodes from a checkpoint
    python train.py --resume run.pt --predict theirs.npy --dataset other.npz    # of a graph with the same features
    torchrun --nproc-per-node 4 train.py --gpus 4 --dataset ogbn-products
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py --gpus 4 --dataset
    ogbn-products

One step is sample -> fetch -> forward -> backward: `train_epoch` is the loop, and loader.py runs the first two ahead of
it on threads. DESIGN.md follows one seed node through the files.
"""

import signal
import sys

import allocator

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback
    if not {"system", "--allocator=system"} & set(sys.argv):
        allocator.before_torch()

import argparse
import copy
import functools
import math
import os
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import ddp
import flags
import step_graph
from allocator import trim_memory
from assemble import build_model, make_sampler, open_data, prepare, reading_all_edges, tune
from checkpoint import check_graph, common_state, complete, restore, save_checkpoint
from disk import StoreError, write_whole
from features import CachedFeatures, FeatureRing, prefetch
from edge_data import edge_data
from graphs import GraphReader
from link import Links, read_pairs, score_pairs
from loader import AtSeedTimes, NodeLoader
from lookahead import LookaheadCache
from metrics import binary_cross_entropy, score
from model import GNN, cross_entropy, inference, layerwise
from own_model import is_own
from plan import advice
from report import Clock, Report, describe, draw_timeline, epoch_line, peak_memory, percent, profile
from sampler import DamagedGraph, mix

torch.autograd.set_multithreading_enabled(False)  # backward on the calling thread: handing over to another takes 50 us

WHOLE_GRAPH_EDGES = 1 << 22  # with no more, a network of one's own is evaluated on the whole graph as one batch


def train_epoch(ranks, args, store, sampler, ring, model, optimizer, stop, save, graphs, epoch, first):
    """Run the steps of one epoch from step `first` -> (steps done in the epoch, stopped early, figures, laps).

    graphs: the step as CUDA graphs, see step_graph.py; None without.
    """
    model.train()
    clock, count, done = Clock(ranks.gpus), 0, first
    loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
    if graphs:
        sampler, ring, loss_sum = graphs, graphs, graphs.begin()
    bar = tqdm(total=args.steps, initial=first, desc=f"epoch {epoch + 1}", leave=False, unit="step",
               disable=None if ranks.leads else True)  # None: no bar where stderr is not a terminal
    # ahead of this loop, on threads: blocks = sampler.sample(seeds, global_step), then ring.fetch(slot, blocks)
    loader = batches(args, ranks, store, sampler, ring, store.split["train"], timed=clock.timed)
    loader.epoch, loader.step = epoch, first
    waiting = time.perf_counter()
    for batch in loader:
        clock.add("stall", waiting, time.perf_counter())
        if batch.began is not None:
            clock.lap("transfer", batch.began, batch.ready)
        t0 = clock.mark("step" if graphs else "forward")
        if graphs:  # all that follows, up to the optimizer's step
            graphs.step(batch)
            clock.lap("step", t0, clock.mark())
        else:
            output = predict(ranks, args, ring, model, batch, mix(mix(args.seed) ^ batch.global_step))
            loss = summed_loss(ring, model, output, batch.y)
            t1 = clock.mark("backward")
            with nullcontext() if batch.last or ranks.world == 1 else model.no_sync():
                # ranks average their gradients: so each seed weighs 1 / total, whatever rank and pass it is in
                (loss * (ranks.world / batch.total)).backward()
            t2 = clock.mark("optimizer" if batch.last else None)
            clock.lap("forward", t0, t1)
            clock.lap("backward", t1, t2)
            loss_sum += loss.detach()
        count += len(batch.y)
        if batch.last:
            if not graphs:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                clock.lap("optimizer", t2, clock.mark())
            done = batch.step + 1
            bar.update()
            if args.checkpoint_every and (batch.global_step + 1) % args.checkpoint_every == 0:
                save(epoch, done)
            if stop.agreed():
                break
        waiting = time.perf_counter()
    bar.close()
    stages = clock.totals()
    seconds = time.perf_counter() - clock.zero
    loss_sum, count = ranks.sum(loss_sum.item(), count)
    if ranks.world > 1 and not graphs:
        stages["exchange"] = ranks.exchange(model) * (done - first)
    figures = {
        "first_step": first,
        "loss": loss_sum / max(count, 1),
        "seconds": seconds,
        "seeds_per_s": count / seconds,
        **stages,
    }
    return done, stop.answer, figures, clock.laps


def summed_loss(ring, model, output, y):
    """The loss of a batch, summed over its seeds: of graphs and links their own, of nodes the cross-entropy of classes
    [S], or of 0 and 1 [S, C] that of each, averaged over C."""
    if isinstance(ring, GraphReader):
        return ring.loss(output, y)
    if isinstance(ring, Links):
        return ring.loss(unwrapped(model).scorer, output, y)
    return cross_entropy(output, y) if y.dim() == 1 else binary_cross_entropy(output, y)


def unwrapped(model):
    """The network inside of DistributedDataParallel."""
    return getattr(model, "module", model)


def batches(args, ranks, graph, sampler, ring, seeds, **options):
    """The NodeLoader of the flags: this rank's part of every step, sampled and fetched by `sampler` and `ring`."""
    return NodeLoader(graph, seeds, args.fanout, batch_size=args.batch_size, accumulate=args.accumulate, seed=args.seed,
                      rank=ranks.rank, world=ranks.world, depth=args.prefetch, threads=args.sample_threads,
                      sampler=sampler, ring=ring, prefetch=prefetch, **options)  # fmt: skip


def predict(ranks, args, ring, model, batch, key=None):
    """Logits [S, C] of a batch's seeds, embeddings, or targets of its graphs, computed in --precision; float32, float64
    with fp64.

    In training, dropout is a function of the key: the same on all ranks, where it is drawn by node.
    """
    network = unwrapped(model)
    if key is not None and not isinstance(network, GNN):
        torch.default_generator.manual_seed(key)  # torch.manual_seed takes 0.1 ms to ask for devices of all kinds
        if ranks.device.type == "cuda":
            torch.cuda.default_generators[ranks.device.index].manual_seed(key)
    with torch.autocast(ranks.device.type, torch.bfloat16) if args.precision == "bf16" else nullcontext():
        if isinstance(network, GNN):
            output = model(batch.blocks, batch.x, aggregated=ring.first_hop, key=key, edges=batch.edges or None)
        elif isinstance(ring, GraphReader):
            output = model(batch.blocks[0])
        else:
            output = output_of_own(args, model, batch)
    return output.to(torch.promote_types(output.dtype, torch.float32))


def output_of_own(args, model, batch):
    """What a model of one's own makes of a batch: float [S, C], or what is wrong with it in a sentence."""
    edges = {"edges": batch.edges} if batch.edges else {}
    try:
        output = model(batch.blocks, batch.x, **edges)
    except Exception as error:
        given = f"{len(batch.blocks)} blocks, one for each number of --fanout, and x {list(batch.x.shape)}"
        given += f", and for each block edges [E, {batch.edges[0].shape[1]}]" if edges else ""
        raise RuntimeError(f"{args.model} failed when it was called with {given}: {error}") from error
    needed = batch.blocks[-1].num_dst, args.model_width
    if not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.shape != needed:
        what = f"{output.dtype} {list(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
        raise StoreError(f"the model returned {what} for {needed[0]} seeds: a row of {needed[1]} logits for each is "
                         "needed")  # fmt: skip
    return output


@torch.no_grad()
def sampled_score(ranks, args, sampler, ring, model, nodes):
    """--metric on nodes through sampled neighbourhoods: an estimate that costs a batch or two; None without nodes."""
    if not nodes.numel():
        return None
    model.eval()
    found = [(predict(ranks, args, ring, model, batch), batch.y)
             for batch in batches(args, ranks, None, sampler, ring, nodes, shuffle=False)]  # fmt: skip
    logits, y = (ranks.rows(torch.cat(rows)) for rows in zip(*found))
    return score(args.metric, logits, y)


def used_by_all(args, store):
    """The columns of edges that exact inference of all nodes uses; for links it is that at the end of time."""
    used, _ = edge_data(args, store)
    return used._replace(time=None) if args.task == "link" else used


def by_layers(args, store, model):
    """Whether exact inference goes layer by layer; at each node's own time every layer has rows of its own."""
    return layerwise(model) and used_by_all(args, store).time is None


def exact_logits(ranks, args, store, model, layers=None):
    """Logits float32 [V, C] of all nodes from all their neighbours: layer by layer, split over the ranks of each
    machine; for a network without layers of model.py in batches, split over all ranks. With `layers` the output of so
    many of the first layers, [V, hidden]."""
    model = copy.deepcopy(model).float() if args.precision == "fp64" else model
    used = used_by_all(args, store)
    if not by_layers(args, store, model):
        return logits_in_batches(ranks, args, store, model, layers)
    features = getattr(store.features, "tensor", store.features)
    total = ranks.sum_here if ranks.local_world > 1 else None
    try:
        with reading_all_edges():
            return inference(model, store.indptr, store.indices, features, rank=ranks.local_rank, edges=used.features,
                             world=ranks.local_world, total=total, layers=layers)  # fmt: skip
    except OSError as error:
        raise StoreError(f"no exact inference: {error}") from error


@torch.no_grad()
def logits_in_batches(ranks, args, store, model, layers=None):
    """Logits float32 [V, C] of all nodes from batches that hold all neighbours as many hops away as --fanout has
    numbers, or those that a node may see at its time: all nodes at once where the graph is small and without times,
    else --batch-size, each batch computing most of the graph again. With `layers` the output of so many of the first
    layers."""
    model.eval()
    used = used_by_all(args, store)
    small, hops = store.num_edges <= WHOLE_GRAPH_EDGES and used.time is None, layers or len(args.fanout)
    sampler = make_sampler(args, store.indptr, store.indices, [-1] * hops, used._replace(weight=None))
    features = getattr(store.features, "tensor", store.features)
    ring = FeatureRing(features, store.labels, slots=args.prefetch + 1, device=ranks.device, dtype=torch.float32,
                       edge_features=used.features)  # fmt: skip
    loader = NodeLoader(store, torch.arange(store.num_nodes), [-1] * hops, shuffle=False, sampler=sampler, ring=ring,
                        batch_size=-(-store.num_nodes // ranks.world) if small else args.batch_size, rank=ranks.rank,
                        world=ranks.world, depth=0 if small else args.prefetch, prefetch=prefetch)  # fmt: skip
    logits = torch.zeros(store.num_nodes, args.hidden if layers else store.num_classes)
    for batch in loader:
        if isinstance(model, GNN):
            x, edges = batch.x, batch.edges or [None] * hops
            for i, block in enumerate(batch.blocks):
                x = model.step(i, block, x, edges=edges[i])
        else:
            x = output_of_own(args, model, batch)
        logits[batch.seeds] = x.float().cpu()
    return ranks.reduce(logits)


@torch.no_grad()
def embeddings_at(ranks, args, links, model, nodes, times):
    """Embeddings of nodes [n] at times [n] from neighbours drawn as in training -> [n, D] in host memory, on all
    ranks."""
    model.eval()
    sampler, h = AtSeedTimes(links.sampler, times, nodes), None
    for batch in batches(args, ranks, None, sampler, links.ring, torch.arange(len(nodes)), shuffle=False):
        found = predict(ranks, args, links.ring, model, batch).cpu()
        h = found.new_zeros(len(nodes), found.shape[1]) if h is None else h
        h[batch.seeds] = found
    return ranks.reduce(h)


def link_scores(ranks, args, store, links, model, part, h=None):
    """MRR, ROC-AUC and so on of the pairs of a part; None where there are none. h: exact embeddings of all nodes."""
    if not len(store.split[part]):
        return None
    if links.evaluation.timed:
        h = embeddings_at(ranks, args, links, model, *links.evaluation.seen(part))
    elif h is None:
        h = exact_logits(ranks, args, store, model)
    return links.evaluation(model.scorer, h, part, ranks)


def worker(ranks, args, path):
    """One rank's whole work -> exit code; what is wrong with the input is said in one sentence."""
    try:
        return run(ranks, args, path)[0] if args.runs == 1 else run_many(ranks, args, path)
    except (StoreError, DamagedGraph) as error:
        if not ranks.leads:
            time.sleep(1)  # rank 0 speaks for all and ends them; a rank that fails alone is still here and speaks
        hint = "; python store.py verify names the file" if isinstance(error, DamagedGraph) else ""
        print(f"train.py: {error}{hint}", file=sys.stderr)
        return 2


def run_many(ranks, args, path):
    """--runs with seeds one after the other, each with its own split where the data set has none or several -> exit
    code."""
    exact = []
    for turn in range(args.runs):
        seed = args.seed + turn
        folder = args.tensorboard and str(Path(args.tensorboard, f"seed{seed}"))
        changed = {"seed": seed, "turn": turn, "tensorboard": folder, "run": f"{args.run}-seed{seed}"}
        code, accuracy = run(ranks, argparse.Namespace(**{**vars(args), **changed}), path)
        if code:
            return code
        exact.append(accuracy)
        path = None  # of the next seed
    columns = {name: [accuracy[name] for accuracy in exact] for name in exact[0] if exact[0][name] is not None}
    mean = {name: statistics.mean(values) for name, values in columns.items()}
    std = {name: statistics.stdev(values) for name, values in columns.items()}
    line = "  ".join(f"{name} {100 * mean[name]:.2f} +- {100 * std[name]:.2f}%" for name in mean)
    report = Report(ranks, argparse.Namespace(**{**vars(args), "tensorboard": None}))
    what = "scores" if args.task == "link" else (args.metric or "score").replace("_", " ")
    report.tell(f"exact {what} over {args.runs} seeds  {line}", {"runs": args.runs, "mean": mean, "std": std})
    return 0


def run(ranks, args, path):
    """Open, train, evaluate -> (exit code, exact accuracy of each split; None where the run was stopped)."""
    tune(ranks, args)
    state, file = common_state(ranks, args)
    store, sampler, ring = open_data(ranks, args, path)
    if state:
        check_graph(state, file, args, store)
        if args.task == "node":
            store.num_classes = state["graph"]["num_classes"]  # the labels of another graph may lack some
    model = build_model(ranks, args, store, ring)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    best = {"score": -1.0, "epoch": 0, "model": None}  # of --early-stop
    start, first = restore(state, file, ranks, args, model, optimizer, best) if state else (0, 0)
    del state
    graphs, said = None, ""
    if args.trains and args.task == "node" and start < args.epochs:
        forward = functools.partial(predict, ranks, args, ring, model)
        graphs, said = step_graph.build(ranks, args, store, sampler, ring, model, optimizer, forward)
    if graphs:
        parallel = model  # they average the gradients themselves
    else:
        parallel = ranks.wrap(model, unused=True) if is_own(args.model) else ranks.wrap(model)
    if ranks.leads:
        describe(ranks, args, store, model)
        if file and args.trains and start < args.epochs:
            print(f"resume  from epoch {start + 1}, step {first}")
        elif file:
            print(f"resume  after epoch {start}: nothing is trained")
        if args.checkpoint and args.trains and args.checkpoint != file and os.path.isfile(args.checkpoint):
            print(f"replace {args.checkpoint} holds an earlier run and will be replaced; --resume auto would go on "
                  "with it")  # fmt: skip
    if ranks.world > 1 and args.task != "graph" and (line := advice(ranks, args, store, model)) and ranks.leads:
        print(line, flush=True)
    if ranks.leads and said:
        print(f"graph   {said}" if graphs else f"graph   no CUDA graphs: {said}", flush=True)
    report, level = Report(ranks, args), 0

    def save(epoch, step):
        if args.checkpoint and ranks.leads:
            save_checkpoint(args.checkpoint, args, store, model, optimizer, best, epoch, step)

    with ddp.StopSignal(ranks) as stop:
        for epoch in range(start, args.epochs if args.trains else start):
            if args.early_stop and epoch - best["epoch"] >= args.early_stop:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, epoch)
            second = epoch == min(start + 1, args.epochs - 1)  # the one that is drawn and traced
            with profile(report, ranks.rank) if args.profile and second else nullcontext():
                step, stopped, figures, laps = train_epoch(
                    ranks, args, store, sampler, ring, parallel, optimizer, stop, save, graphs, epoch, first
                )
            if args.timeline and second and ranks.leads:
                with report.attempt("timeline"):
                    draw_timeline({f"--prefetch {args.prefetch}": laps}, args.timeline)
            if stopped:
                save(epoch, step)
                kept = f"go on with: {args.again}" if args.checkpoint else "nothing kept: no --checkpoint"
                report.tell(f"stopped in epoch {epoch + 1} after step {step}; {kept}", {"stopped": [epoch + 1, step]})
                ranks.barrier()
                return stop.exit_code, None
            valid = validate(ranks, args, store, sampler, ring, model)
            figures = {"epoch": epoch + 1, **figures, "lr": learning_rate(args, epoch), **valid,
                       "peak_bytes": peak_memory(ranks)}  # fmt: skip
            report.tell(epoch_line(args, figures), figures)
            watched = (
                figures["valid"][args.metric]
                if args.early_stop and args.task == "link"
                else figures.get("valid_sampled")
            )
            if args.early_stop and watched > best["score"]:
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                best.update(score=watched, epoch=epoch + 1, model=weights)
            save(epoch + 1, 0)
            if args.allocator == "tuned" and not ranks.gpus:
                level = trim_memory(level)
            first = 0
    ranks.check_equal(model)
    exact = finish(ranks, args, store, ring, model, best, report)
    return 2 if report.failed & {"profile", "timeline"} else 0, exact


def validate(ranks, args, store, sampler, ring, model):
    """What validation nodes (sampled), links (exact) or graphs (exact, on one rank) say of the model -> figures."""
    share_buffers(ranks, model)
    if args.task == "graph":
        return {"valid": ring.scores(args, model, store.split["valid"]) if ranks.leads else None}
    if args.task == "link":
        return {"valid": link_scores(ranks, args, store, ring, model, "valid")}
    figures = {"valid_sampled": sampled_score(ranks, args, sampler, ring, model, store.split["valid"])}
    if isinstance(ring.features, (CachedFeatures, LookaheadCache)):
        figures["cache_hit_rate"] = ring.features.hit_rate
    if isinstance(ring.features, LookaheadCache):
        figures.update(ring.features.counts())
    return figures


def learning_rate(args, epoch):
    """The rate of an epoch, counted from 0; the cosine falls from --lr to 0 over all of --epochs."""
    return args.lr * ((1 + math.cos(math.pi * epoch / args.epochs)) / 2 if args.lr_schedule == "cosine" else 1.0)


def share_buffers(ranks, model):
    """Give every rank the running statistics of rank 0's batch norm."""
    if ranks.world > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


def finish(ranks, args, store, ring, model, best, report):
    """Evaluate the last weights, or the best of --early-stop, exactly -> --metric of each split; write --predict."""
    if best["model"]:
        model.load_state_dict(best["model"])
        if ranks.leads:
            how = f"{args.metric} {best['score']:.4f}" if args.task == "link" else f"{percent(best['score'])} (sampled)"
            print(f"best    weights of epoch {best['epoch']}: valid {how}")
    if args.task == "graph":
        scores = {name: ring.scores(args, model, ids) for name, ids in store.split.items()} if ranks.leads else {}
        report.scores(scores)
        ranks.barrier()
        return None
    metric = f"{'exact layer-wise' if by_layers(args, store, model) else 'exact'} {args.metric.replace('_', ' ')}"
    large = ranks.sum(store.features.large)[0]  # on any rank: each saw what was free at its start
    if args.task == "node" and large and not args.predict:
        report.tell(f"{metric}  n/a: the features do not fit into memory; --predict computes it", {"exact": None})
        return dict.fromkeys(store.split)
    timed = args.task == "link" and ring.evaluation.timed
    logits = None if timed and not args.predict else exact_logits(ranks, args, store, model)
    if args.task == "link":
        scores = {name: link_scores(ranks, args, store, ring, model, name, logits) for name in ("valid", "test")}
        exact = report.scores(scores)
        if args.predict and ranks.leads:
            scorer = copy.deepcopy(model.scorer).to("cpu", logits.dtype)
            array = score_pairs(scorer, logits, read_pairs(args.pairs, store.num_nodes)) if args.pairs else logits
            write_whole(args.predict, lambda file: np.save(file, array.numpy()))
        ranks.barrier()
        return exact
    exact = {name: score(args.metric, logits[nodes], store.labels[nodes]) for name, nodes in store.split.items()}
    line = "  ".join(f"{name} {percent(figure)}" for name, figure in exact.items())
    report.tell(f"{metric}  {line}", {"exact": exact, "seed": args.seed})
    report.results({f"exact/{name}": figure for name, figure in exact.items()}, args.epochs)
    if args.predict:
        if args.predict_what == "embeddings":
            logits = exact_logits(ranks, args, store, model, layers=args.num_layers - 1)
        if ranks.leads:
            array = predictions(args.predict_what, logits, several=store.labels.dim() == 2).numpy()
            write_whole(args.predict, lambda file: np.save(file, array))
    ranks.barrier()
    return exact


def predictions(what, logits, several):
    """What --predict writes: of logits [V, C] the classes [V] or their probabilities; of `several` labels a node 0 and
    1 and the probability of each [V, C]. Logits and embeddings stay as they are."""
    if what == "classes":
        return (logits > 0).to(torch.int8) if several else logits.argmax(1)
    if what == "scores":
        return logits.sigmoid() if several else logits.softmax(1)
    return logits


def parse_args(argv):
    """The command line, completed by the checkpoint to go on from; see flags.py and checkpoint.py."""
    return flags.parse_args(argv, complete)


def main(argv=None):
    """Run the command line -> exit code."""
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        path = None if ddp.under_torchrun() else prepare(args)
        ddp.launch(worker, max(args.gpus, args.procs), args, path, gpus=args.gpus)
    except StoreError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output is gone, `head` say; the interpreter flushes it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
