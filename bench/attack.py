"""python -m bench attack: damage input files, kill running processes, and count the outcomes.

    python -m bench attack --minutes 10
    python -m bench attack --only lmdb --case 417          # rerun one case, with all that it prints

A case depends only on (seed, kind, number) and runs in a forked process with bounded memory and time:

    mmap, lmdb, changed, graphs        a store with one thing wrong is verified, read and trained on; `changed` is an LMDB
                                       store with rows changed by put_rows, `graphs` holds many small graphs
    parts                              one of two parts of a store with one thing wrong, or a forged number of it; both are
                                       verified, compared as machines compare them, and read
    npz, csv                           a file with one thing wrong is built into a store, which is trained on
    damaged, forged                    a run resumes from a checkpoint with other bytes, or with other contents
    build, put, append, train          kill -9 at some moment; the files are checked, then the work is completed

A case ends well in one of three ways: fine (the result is that without damage or, if something else was written, that
of what was written), refused in one sentence, or named (`verify` says what is wrong; training did not look and went
on). LMDB's own SIGBUS is counted separately if `verify` had named the file. Anything else is a failure: a crash, a
traceback, a hang, memory beyond the bound, a silent difference, no sentence, files where none belong.
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

import store
import train
from bench.harm import harm_bytes, harm_store, harm_values, other_value, pick
from bench.tools import exit_code, print_table
from disk import files
from disk.files import StoreError
from extras import graph_store
from extras.graph_store import GraphDataset, block_diagonal, build_graphs
from extras.split import machines_by_part
from run.checkpoint import check_same, digests
from sources import arrays, cli
from sources.prepare import build
from store import GraphStore

FAILURES = ("crash", "traceback", "hang", "memory", "silent", "unsaid", "strewn")
OUTCOMES = ("fine", "refused", "named", "sigbus", *FAILURES)
SECONDS = 60  # of a case
MEMORY = 3 << 28  # bytes beyond a case without damage; also the free memory that cases see
ADDRESSES = 6 << 30  # bytes of address space: LMDB and threads reserve more than they use
OURS = set("notes printed store built bad.pt out.pt out.npy csv npz.npz".split())
NO_MEMORY = re.compile("MemoryError|allocate|bad_alloc")
SENTENCE = re.compile(r"\S+: (error: )?\S.{,1000}")  # one line; must be printable too
NODES, WIDTH = 160, 40
PARTS = {"train": "train_idx", "valid": "val_idx", "test": "test_idx"}
TABLES = {"edges": "edge_index", "features": "features", "labels": "labels", **PARTS}
NODE = "--fanout 3,3 --cache 2000 --sample-threads 2".split()
PREDICT = "--predict out.npy --predict-what scores".split()
GRAPH = "--task graph --num-layers 2".split()
LIMITS = "--max-nodes 40 --max-edges 50".split()


class Case(NamedTuple):
    """One case. A negative number means no damage, for comparison."""

    kind: str
    number: int
    base: Path  # folder of undamaged inputs
    folder: Path  # working folder of this case
    seed: int = 0
    usual: float = 0.0  # seconds that the work takes if it is not killed

    def random(self):
        """Return the random generator of the case; None if there is no damage."""
        key = [self.seed, zlib.crc32(self.kind.encode()), self.number]
        return np.random.default_rng(key) if self.number >= 0 else None

    def note(self, **facts):
        """Append facts to the case's notes, which survive the end of this process."""
        with open(self.folder / "notes", "a") as file:
            file.write(json.dumps(facts) + "\n")

    def notes(self):
        """Return a dict of all notes, what was printed, and `strewn`: files that should not be there."""
        notes = {"strewn": [], "printed": (self.folder / "printed").read_text(errors="replace")}
        for line in (self.folder / "notes").read_text().splitlines():
            notes |= json.loads(line)
        notes["strewn"] += sorted({file.name for file in self.folder.iterdir()} - OURS)
        return notes


def inside(case):
    """Run a case in its folder, with bounded memory and with its output in a file."""
    signal.alarm(SECONDS)
    shutil.rmtree(case.folder, ignore_errors=True)
    case.folder.mkdir()
    os.chdir(case.folder)
    case.note(code=None)
    printed = open("printed", "w", buffering=1)
    for number in (1, 2):
        os.dup2(printed.fileno(), number)
    sys.stdout = sys.stderr = printed
    torch.set_num_threads(1)
    for module in (arrays, store):
        module.free_host_bytes = lambda: MEMORY
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ADDRESSES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ATTACKS.get(case.kind, make_good)(case)
    case.note(peak=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def judge(case, code, good, usual):
    """Classify the result of a case -> (one of OUTCOMES, a line about it).

    Args:
        code: of its exit. good: notes of its kind without damage. usual: peak bytes without damage.
    """
    notes = case.notes()
    printed = notes["printed"]
    named = notes.get("verified", 0) != 0
    last = printed.rstrip("\n").split("\n")[-1]
    if code == -signal.SIGALRM:
        return "hang", f"more than {SECONDS} s"
    if NO_MEMORY.search(printed) or notes.get("peak", 0) > usual + 1.1 * MEMORY:
        return "memory", f"{(notes.get('peak', 0) - usual) >> 20} MiB more than usual; {last}"
    if code < 0:
        in_lmdb = code == -signal.SIGBUS and named and case.kind in ("lmdb", "changed", "graphs")
        return "sigbus" if in_lmdb else "crash", f"{signal.Signals(-code).name}; verify: {named}"
    if code or "Traceback (most recent call last)" in printed:
        return "traceback", last
    if notes["strewn"]:
        return "strewn", str(notes["strewn"])
    if notes.get("wrong"):
        return "silent", f"what is there is wrong: {notes['wrong']}"
    if notes["code"] in (1, 2) and SENTENCE.fullmatch(last) and last.isprintable():
        # checksums of forged values fit: only training can refuse them
        rightly = named or "verified" not in notes or notes.get("forged")
        return ("refused", last) if rightly else ("silent", f"verify had nothing to say; {last}")
    if notes["code"] != 0:
        return "unsaid", f"exit code {notes['code']}; {last}"
    if notes.get("result") == good.get("result"):
        return "fine", "as without damage"
    if named:
        return "named", "trained on, with another result"
    return ("fine", "what was written") if notes.get("forged") else ("silent", "another result")


def make_good(case):
    """Make the inputs, stores and checkpoints that cases copy; this also compiles the C code."""
    base = case.base
    random = np.random.default_rng(0)
    graph = {
        "edge_index": random.integers(0, NODES, (2, 600)),
        "features": random.standard_normal((NODES, WIDTH)).astype(np.float32),
        "labels": random.integers(0, 4, NODES),
        **dict(zip(PARTS.values(), np.split(random.permutation(NODES), [64, 96]))),
    }
    np.savez(base / "npz.npz", **graph)
    (base / "csv").mkdir()
    for name, entry in TABLES.items():
        rows = graph[entry].T if name == "edges" else graph[entry]
        np.savetxt(base / "csv" / f"{name}.csv", rows, "%.9g", ",")
    nodes = random.integers(2, 9, 40)
    ends = random.integers(0, nodes.repeat(nodes), (2, nodes.sum()))
    x = random.integers(0, 9, (nodes.sum(), 3), np.uint8)
    e = random.random((nodes.sum(), 2)).astype(np.float32)
    y = nodes[:, None].astype(np.float32)
    made = block_diagonal(nodes, nodes, ends, x=x, e=e, y=y)
    split = {"train": range(24), "valid": range(24, 32), "test": range(32, 40)}
    build_graphs(base / "graphs", [made], split=split)
    many = GraphDataset.open(base / "graphs")
    many.append(many.batch(range(10)))
    build(base / "npz.npz", base / "mmap")
    store.split(base / "mmap", 2, base / "parts")
    build(base / "npz.npz", base / "lmdb", backend="lmdb", block_rows=2)  # many small values
    build(base / "npz.npz", base / "changed", backend="lmdb", block_rows=30)
    features = GraphStore.open(base / "changed").features
    for number in range(3):
        features.put_rows(torch.arange(0, NODES, 7), torch.full((23, WIDTH), float(number)))
    for lock in base.glob("*/*-lock"):
        lock.unlink()
    run_train(case, base / "mmap", 1, *NODE, "--checkpoint", base / "good.pt")


def take(case, source, target, harm=None):
    """Copy an undamaged input and damage the copy with harm(path, random) -> (description, whether it is forged)."""
    good = case.base / source
    (shutil.copytree if good.is_dir() else shutil.copyfile)(good, target)
    if harm and (random := case.random()):
        what, forged = harm(Path(target), random)
        case.note(what=what, forged=bool(forged))


def attack_store(case):
    take(case, case.kind, "store", harm_store)
    case.note(verified=exit_code(cli.main, ["verify", "store"]))
    train_on(case, "store")


def attack_parts(case):
    def harm(path, random):
        part = path / f"part-{random.integers(2)}"
        if random.random() < 0.6:
            return harm_store(part, random)
        meta = files.read_meta(part)
        part_meta = {name: meta[name] for name in ("part", "whole")}
        what = other_value(part_meta, random)
        (part / "meta.json").write_bytes(files.dump_meta(meta | part_meta))
        return what, True

    take(case, "parts", "store", harm)
    codes = [exit_code(cli.main, ["verify", f"store/part-{m}"]) for m in range(2)]
    case.note(verified=max(codes))
    try:
        case.note(code=0, result=digest_of_parts())
    except StoreError as error:
        print(f"attack: {error}")
        case.note(code=2)


def digest_of_parts():
    """Check two parts as their machines do -> a digest of all rows, in the order of ids."""
    stores = [GraphStore.open(f"store/part-{m}") for m in range(2)]
    machines = [range(1), range(1, 2)]
    ranks = SimpleNamespace(machines=lambda: machines, gather=lambda _: [s.part for s in stores])
    plan = SimpleNamespace(split_features=True, mode="cpu-cpu")
    ordered = machines_by_part(ranks, plan, stores[0])
    check_same(SimpleNamespace(gather=lambda _: [*map(digests, stores)]), {})
    digest = hashlib.sha256()
    for (machine,) in ordered:
        rows = stores[machine].features
        digest.update(rows.gather(torch.arange(rows.first, rows.stop)).numpy())
    return digest.hexdigest()


def attack_input(case):
    """Build a store from damaged files, verify it and train on it. That it holds what the files do is tested in tests/."""

    def harm(path, random):
        if case.kind == "csv":
            return harm_bytes(path / f"{pick(list(TABLES), random)}.csv", random)[0], True
        return (harm_bytes if random.random() < 0.5 else harm_values)(path, random)

    source = "npz.npz"
    words = [source, "built"]
    if case.kind == "csv":
        source = "csv"
        words[0] = "csv/edges.csv"
        for name in list(TABLES)[1:]:
            words += [f"--{name}", f"csv/{name}.csv"]
    take(case, source, source, harm)
    code = exit_code(cli.main, ["build", *words])
    case.note(code=code, strewn=["built"] if code and Path("built").exists() else [])
    if code == 0:
        case.note(wrong=store.verify("built"))
        train_on(case, "built")


def attack_checkpoint(case):
    take(case, "good.pt", "bad.pt", harm_values if case.kind == "forged" else harm_bytes)
    words = ["--resume", "bad.pt", "--checkpoint", "out.pt"]
    run_train(case, case.base / "mmap", 2, *NODE, *words)


def attack_process(case):
    """Kill a process at work, check what it left, and finish the work."""
    work, problems, good = WORK[case.kind]
    if good:
        take(case, good, "store")
    if random := case.random():
        after = random.uniform(0, 1.1 * case.usual)
        child = multiprocessing.get_context("fork").Process(target=work, args=[case])
        child.start()
        time.sleep(after)
        child.kill()
        child.join()
        what = f"killed after {1e3 * after:.0f} of about {1e3 * case.usual:.0f} ms"
        case.note(what=what, wrong=problems())
    began = time.monotonic()
    work(case)
    strewn = sorted(file.name for file in Path().rglob(".*"))
    case.note(seconds=time.monotonic() - began, strewn=strewn)
    if case.kind != "train":
        train_on(case, "store")


def build_it(case):
    if not Path("store").exists():
        build(case.base / "npz.npz", "store", backend="lmdb")


def put_it(case):
    """Put rows that all hold the next number, up to 40."""
    features = GraphStore.open("store").features
    for number in range(int(features.gather(torch.tensor([0]))[0, 0]) + 1, 41):
        features.put_rows(torch.arange(NODES), torch.full((NODES, WIDTH), float(number)))


def append_it(case):
    """Append 40 graphs at a time until there are 1,050."""
    many = GraphDataset.open("store")
    while len(many) < 1050:
        many.append(many.batch(range(40)))


def train_it(case):
    """Train, or resume training, with a checkpoint after every step."""
    words = ["--checkpoint", "out.pt", "--checkpoint-every", 1, "--resume", "auto"]
    run_train(case, case.base / "mmap", 4, *NODE, *words)


def torn():
    """Return what is wrong with rows that were being put: all are of one update, or at first every seventh."""
    rows = GraphStore.open("store").features.gather(torch.arange(NODES))
    same = rows[::7].eq(2).all() or rows.eq(rows[0, 0]).all()
    return store.verify("store") + ([] if same else ["rows of two moments"])


WORK = {  # (function to kill, function -> what is wrong with what it left, store that it changes)
    "build": (build_it, lambda: store.verify("store") if Path("store").exists() else [], None),
    "put": (put_it, torn, "changed"),
    "append": (append_it, lambda: graph_store.verify("store"), "graphs"),
    "train": (train_it, list, None),  # resuming from the checkpoint checks more
}
ATTACKS = {
    **dict.fromkeys(("mmap", "lmdb", "changed", "graphs"), attack_store),
    "parts": attack_parts,
    **dict.fromkeys(("npz", "csv"), attack_input),
    **dict.fromkeys(("damaged", "forged"), attack_checkpoint),
    **dict.fromkeys(WORK, attack_process),
}


def train_on(case, dataset):
    """Train on a store and note the result."""
    words = {"graphs": GRAPH + LIMITS, "append": GRAPH}.get(case.kind, NODE + PREDICT)
    run_train(case, dataset, 1, *words, "--checkpoint", "out.pt")


def run_train(case, dataset, epochs, *words):
    """Run train.py and note its exit code and a digest of its result: the weights, and the scores of all nodes."""
    sizes = ["--batch-size", 32, "--hidden", 8, "--gpus", 0, "--epochs", epochs]
    code = exit_code(train.main, ["--dataset", dataset, *sizes, *words])
    case.note(code=code)
    if code == 0 and Path("out.pt").exists():
        weights = torch.load("out.pt", weights_only=True)["model"].values()
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights))
        digest.update(Path("out.npy").read_bytes() if Path("out.npy").exists() else b"")
        case.note(result=digest.hexdigest())


def bench_attack(args):
    """Run rounds of cases until --minutes are over, printing every failure and a table -> figures."""
    import torch._dynamo  # noqa: F401  Adam imports it: once here, not in every case

    if args.only and args.only not in ATTACKS or args.case is not None and not args.only:
        raise StoreError(f"--only {args.only}: one of {', '.join(ATTACKS)}; --case N needs it")
    end = time.monotonic() + 60 * args.minutes
    kinds = [args.only] if args.only else list(ATTACKS)
    rows = {kind: dict.fromkeys(("tried", *OUTCOMES), 0) for kind in kinds}
    good = {}
    failed = []
    numbers = itertools.count() if args.case is None else [args.case]
    with tempfile.TemporaryDirectory(prefix="attack-") as place:
        base = Path(place, "base")
        base.mkdir()
        for kind in ["good", *kinds]:  # make inputs, then each kind without damage
            case = Case(kind, -1, base, Path(place, kind))
            code = run(case)
            good[kind] = notes = case.notes()
            if code or any(notes.get(name) for name in ("code", "verified", "wrong", "strewn")):
                raise RuntimeError(f"{kind} fails without damage: {notes}")
        peak = max(notes["peak"] for notes in good.values())
        for number, kind in ((number, kind) for number in numbers for kind in kinds):
            if number == args.rounds or time.monotonic() > end:
                break
            usual = good[kind].get("seconds", 0.0)
            case = Case(kind, number, base, Path(place, f"{kind}{number}"), args.seed, usual)
            outcome, line = judge(case, run(case), good[kind], peak)
            notes = case.notes()
            entry = [kind, number, outcome, notes.get("what"), line[:300]]
            rows[kind]["tried"] += 1
            rows[kind][outcome] += 1
            if outcome in FAILURES:
                failed.append(entry)
                print(*entry, flush=True)
            if args.case is not None:
                print(*entry, notes.pop("printed"), notes)
            shutil.rmtree(case.folder, ignore_errors=True)
    print_table("kind", rows)
    return {"outcomes": rows, "failed": failed}


def run(case):
    """Run a case in a fork -> its exit code."""
    process = multiprocessing.get_context("fork").Process(target=inside, args=[case])
    process.start()
    process.join()
    return process.exitcode
