"""Attack what this project reads, and processes at work, and count what comes of it.

    python bench.py attack --minutes 10                    # or python bench_attack.py
    python bench_attack.py --only lmdb --case 417          # one case again, with all that it printed

A case is made from (seed, kind, number) alone and runs in a process of its own, which is forked from one that has
imported everything and has bounded memory and time:

    mmap, lmdb, changed, graphs        a store with one thing wrong is verified, read and trained on; `changed` is one
                                       in LMDB some rows of which were put, `graphs` holds many small graphs
    npz, csv, molecules, crystals      a file with one thing wrong is built into a store, which is trained on
    damaged, forged                    a run, of nodes or links by turns, goes on from a checkpoint with other bytes,
                                       or with other things in it
    build, put, append, train          kill -9 at some moment; what is there is looked at, and then brought to its end

A case ends well in one of three ways: fine (the result is what it is without damage; or, where something else was
written, what was written), refused in one sentence, or named (`verify` says what is wrong, training was not asked to
look and went on). LMDB's own SIGBUS is counted apart, where `verify` had named the file. All else is a failure: a
crash, a traceback, a hang, memory beyond the bound, a silent difference, no sentence, files where none belong.
"""

import argparse
import collections
import contextlib
import ctypes
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import arrays
import graphs
import plan
import store
import train
from bench_harm import (NODES, TABLES, WIDTH, arguments, forge_checkpoint, harm_checkpoint, harm_csv, harm_npz,
                        harm_store, make_good, read_slowly)  # fmt: skip
from bench_tools import hardware, keep_figures, print_table
from disk import StoreError
from graphs import GraphDataset
from store import GraphStore, build_store

GROUPS = {  # cases of each kind in a round; of the kills one kind a round
    "stores": {"mmap": 5, "lmdb": 5, "changed": 5, "graphs": 5},
    "inputs": {"npz": 3, "csv": 3, "molecules": 2, "crystals": 2},
    "checkpoints": {"damaged": 5, "forged": 5},
    "kills": {"build": 1, "put": 1, "append": 1, "train": 1},
}
KINDS = [kind for kinds in GROUPS.values() for kind in kinds]
FAILURES = ("crash", "traceback", "hang", "memory", "silent", "unsaid", "strewn")
SECONDS = 60  # of a case
MEMORY = 3 << 28  # bytes that are free, as a case is told: what it may take beyond what it takes without damage
ADDRESSES = 6 << 30  # bytes of address space: LMDB and every thread reserve some that they never take
MODELS = [  # by turns: they differ in what they read before, while and after they are trained
    ["--model", "sage"], ["--model", "gcn"], ["--model", "gat", "--heads", "2"],
    ["--model", "sage", "--cache", "2000", "--sample-threads", "2"],
]  # fmt: skip


class Case(NamedTuple):
    """One case. Where nothing is to be wrong, for comparison, its number is -1 - i for the model i."""

    kind: str
    number: int
    seed: int
    base: Path  # folder of what is good
    folder: Path  # its own, in which it runs

    @property
    def group(self):
        """The one of GROUPS that its kind is in."""
        return next((group for group, kinds in GROUPS.items() if self.kind in kinds), None)

    @property
    def random(self):
        """The random numbers of the case; None where nothing is to be wrong."""
        key = [self.seed, zlib.crc32(self.kind.encode()), self.number]
        return np.random.default_rng(key) if self.number >= 0 else None

    @property
    def model(self):
        """Number of its entry in MODELS."""
        return self.number % len(MODELS) if self.number >= 0 else -1 - self.number

    def note(self, **facts):
        """Write down what is known, in case this process ends."""
        with open(self.folder / "notes", "a") as file:
            file.write(json.dumps(facts) + "\n")

    def notes(self):
        """All that was written down -> dict."""
        file = self.folder / "notes"
        lines = file.read_text().splitlines() if file.exists() else []
        return {name: value for line in lines for name, value in json.loads(line).items()}

    def printed(self):
        """All that was printed."""
        file = self.folder / "printed"
        return file.read_text(errors="replace") if file.exists() else ""


# ---------------------------------------------------------------------------------------------------------------------
# what a case does, in a process and a folder of its own


def attack_store(case):
    """Verify, read and train on a store."""
    many, path = case.kind == "graphs", Path("store")
    shutil.copytree(case.base / case.kind, path)
    if case.random:
        what, forged = harm_store(path, case.random)
        case.note(what=what, forged=forged)
    case.note(verified=exit_code(store.main, ["verify", str(path)]))
    with contextlib.suppress(StoreError):
        case.note(read=contents(path, many))
    train_on(case, path, *([] if many else MODELS[case.model]), task="graph" if many else "node")


def attack_input(case):
    """Build a store from files, verify it and train on it."""
    many, source = case.kind in ("molecules", "crystals"), Path("csv" if case.kind == "csv" else f"{case.kind}.npz")
    (shutil.copytree if case.kind == "csv" else shutil.copyfile)(case.base / source, source)
    written = None
    if case.kind == "csv":
        if case.random:
            case.note(what=harm_csv(source, case.random))
        written = read_slowly(source)
        files = {name: next(source.glob(f"{name}.csv*")) for name in TABLES}
        words = [files.pop("edges"), "built", *(word for name in files for word in (f"--{name}", files[name]))]
    else:
        if case.random:
            what, written = harm_npz(source, case.random)
            case.note(what=what)
        words = [source, "built"]
    case.note(forged=written is not None or case.kind == "csv")
    code = exit_code(store.main, ["build", *map(str, words)])
    case.note(code=code)
    if code == 0:
        wrong = (graphs if many else store).verify("built")
        case.note(wrong=wrong or (written and not many and differs("built", written)))
        train_on(case, "built", task="graph" if many else "node")
    elif Path("built").exists():
        case.note(strewn=["built"])


def attack_checkpoint(case):
    """Go on from a checkpoint."""
    task = ("node", "link")[case.model % 2]
    shutil.copyfile(case.base / f"{task}.pt", "bad.pt")
    if case.random:
        harm = forge_checkpoint if case.kind == "forged" else harm_checkpoint
        case.note(what=harm(Path("bad.pt"), case.random), forged=case.kind == "forged")
    Path("victim").write_text("untouched")
    words = command(case.base / "mmap", 2, "--resume", "bad.pt", "--checkpoint", "out.pt", task=task)
    case.note(code=exit_code(train.main, words))
    others = {file.name for file in Path().iterdir()} - {"bad.pt", "out.pt", "victim", "notes", "printed"}
    case.note(strewn=sorted(others | ({"victim"} if Path("victim").read_text() != "untouched" else set())))
    note_result(case)


def attack_process(case):
    """Kill a process at work, look at what it left, and bring the work to its end."""
    work, problems = WORK[case.kind]
    if case.kind in ("put", "append"):
        shutil.copytree(case.base / ("changed" if case.kind == "put" else "graphs"), "store")
    if case.random:
        usual = json.loads((case.base / "seconds").read_text())[case.kind]
        after = case.random.uniform(0, 1.1 * usual)
        child = os.fork()
        if not child:
            end_with_the_parent()
            with contextlib.suppress(BaseException):
                work(case)
            os._exit(0)
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        when = f"killed after {1e3 * after:.0f} of about {1e3 * usual:.0f} ms"
        case.note(what=when if killed else "it was done before", wrong=problems())
    began = time.monotonic()
    work(case)
    case.note(seconds=time.monotonic() - began, code=0, strewn=sorted(file.name for file in Path().rglob(".*")))
    note_result(case)
    if case.kind != "train":
        case.note(read=contents(Path("store"), case.kind == "append"))


def build_it(case):
    """Build a store, unless it is there."""
    if not Path("store").exists():
        build_store("store", backend="lmdb", **arguments(dict(np.load(case.base / "npz.npz"))))


def put_it(case):
    """Put rows that all hold the next number, up to 40."""
    features = GraphStore.open("store").features
    first = int(features.gather(torch.tensor([0]))[0, 0])
    for number in range(first + 1, 41):
        features.put_rows(torch.arange(NODES), torch.full((NODES, WIDTH), float(number)))


def append_it(case):
    """Append graphs, forty at a time, until there are 1,050."""
    many = GraphDataset.open("store")
    batch = many.batch(range(40))
    while len(many) < 1050:
        many.append(batch)


def train_it(case):
    """Train, or go on with it, with a checkpoint after every step."""
    words = command(case.base / "mmap", 4, "--checkpoint", "out.pt", "--checkpoint-every", 1, "--resume", "auto")
    if code := exit_code(train.main, words):
        raise RuntimeError(f"training ended with {code}")


def rows_of_two_moments():
    """Problems of a store whose rows were being put: all of one moment are the same, at first every seventh."""
    rows = GraphStore.open("store").features.gather(torch.arange(NODES))
    same = rows[::7].eq(2).all() or rows.eq(rows[0, 0]).all()
    return store.verify("store") + ([] if same else ["rows of two moments"])


def graphs_of_two_moments():
    """Problems of a data set to which graphs were being appended."""
    count = len(GraphDataset.open("store"))
    return graphs.verify("store") + ([] if count % 40 == 10 else [f"{count} graphs"])


def broken_checkpoint():
    """Problems of a checkpoint that was being written; going on from it says more."""
    return [] if not Path("out.pt").exists() or torch.load("out.pt", weights_only=True) else ["out.pt is empty"]


WORK = {  # what is killed, and what is wrong with what it left
    "build": (build_it, lambda: store.verify("store") if Path("store").exists() else []),
    "put": (put_it, rows_of_two_moments),
    "append": (append_it, graphs_of_two_moments),
    "train": (train_it, broken_checkpoint),
}
ATTACKS = dict(zip(GROUPS, (attack_store, attack_input, attack_checkpoint, attack_process)))


def command(dataset, epochs, *words, task="node"):
    """The command line of a small training run -> list of words."""
    layers = ["--num-layers", 2] if task == "graph" else ["--fanout", "3,3"]
    sizes = [*layers, "--batch-size", 32, "--hidden", 8, "--gpus", 0, "--epochs", epochs]
    return [str(word) for word in ["--task", task, "--dataset", dataset, *sizes, *words]]


def exit_code(main, words):
    """What a command line ends with."""
    try:
        return main(words)
    except SystemExit as error:
        return error.code


def train_on(case, dataset, *words, task):
    """Train on a store, note the exit code and what came out."""
    predict = ["--predict", "out.npy"] if task == "node" else []
    case.note(code=exit_code(train.main, command(dataset, 1, "--checkpoint", "out.pt", *predict, *words, task=task)))
    note_result(case)


def note_result(case):
    """Note a digest of what training has left."""
    if case.notes()["code"] == 0 and Path("out.pt").exists():
        state = torch.load("out.pt", weights_only=True)
        predicted = np.load("out.npy") if Path("out.npy").exists() else []
        case.note(result=digest(state["model"], state["optimizer"], state["epoch"], predicted))


def contents(path, many):
    """A digest of all that is read from a store."""
    if many:
        data = GraphDataset.open(path)
        return digest(data.batch(range(len(data))), data.split)
    graph = GraphStore.open(path)
    rows = graph.features.gather(torch.arange(graph.num_nodes))
    return digest(rows, graph.indptr, graph.indices, graph.labels, graph.split)


def digest(*values):
    """SHA-256 over arrays, tensors and numbers, nested as they may be -> hex."""
    total = hashlib.sha256()
    for value in values:
        if isinstance(value, (dict, list, tuple)):
            total.update(digest(*(value.values() if isinstance(value, dict) else value)).encode())
        else:
            array = np.ascontiguousarray(value)
            total.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return total.hexdigest()


def differs(path, arrays):
    """The name of what is not in a store as it is in the arrays of its source, or None."""
    graph = GraphStore.open(path)
    dst = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.indptr.diff())
    in_order = lambda pairs: pairs[:, np.lexsort(pairs)]  # noqa: E731
    found = {"edge_index": in_order(np.stack([graph.indices.long(), dst])), "labels": graph.labels.numpy(),
             "features": graph.features.gather(torch.arange(graph.num_nodes)).double().numpy()}  # fmt: skip
    for name, entry in (("train", "train_idx"), ("valid", "val_idx"), ("test", "test_idx")):
        found[entry] = np.sort(graph.split[name].numpy())
    for name in found.keys() & arrays.keys():
        given = np.asarray(arrays[name])
        if name.endswith("_idx"):
            given = np.sort(np.flatnonzero(given) if given.dtype == bool else given)
        elif name == "edge_index":
            given = in_order(given)
        elif name == "features":
            given = given.astype(str(graph.features.dtype).removeprefix("torch.")).astype(np.float64)
        if given.size != found[name].size or not np.array_equal(found[name], given.reshape(found[name].shape)):
            return name
    return None


# ---------------------------------------------------------------------------------------------------------------------
# processes


class Ended(NamedTuple):
    """How the process of a case ended."""

    status: int | None  # as os.wait4 gives it; None: it took too long
    peak: int  # bytes of memory


def run_all(cases, workers, done):
    """Run cases, (Case, function) each, some at a time, and call done(case, Ended) as they end."""
    running, cases = {}, iter(cases)
    try:
        while True:
            while len(running) < workers and (entry := next(cases, None)):
                running[start(*entry)] = entry[0], time.monotonic()
            if not running:
                return
            for child, (case, began) in list(running.items()):
                late = time.monotonic() - began > SECONDS
                if late:
                    os.killpg(child, signal.SIGKILL)
                ended, status, usage = os.wait4(child, 0 if late else os.WNOHANG)
                if ended:
                    del running[child]
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)  # what it has started itself
                    done(case, Ended(None if late else status, 1024 * usage.ru_maxrss))
            time.sleep(0.002)
    finally:
        for child in running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def start(case, work):
    """Fork a process that does work(case) in the case's folder, in bounded memory -> its number."""
    shutil.rmtree(case.folder, ignore_errors=True)
    case.folder.mkdir()
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        end_with_the_parent()
        os.chdir(case.folder)
        printed = open("printed", "w", buffering=1)
        for number in (1, 2):
            os.dup2(printed.fileno(), number)
        sys.stdout = sys.stderr = printed
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        torch.set_num_threads(1)
        for module in (arrays, plan, store):
            module.free_host_bytes = lambda: MEMORY
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ADDRESSES,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        work(case)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end_with_the_parent():
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------------
# judgement

NO_MEMORY = re.compile("MemoryError|allocate|bad_alloc")
SENTENCE = re.compile(r"\S+: (error: )?\S.{,1000}")  # and printable


def judge(case, ended, good, usual):
    """What came of a case -> (outcome, a line about it).

    Args:
        ended: how its process did. good: notes of the same case without damage. usual: bytes of memory that it takes.
    """
    notes, printed = case.notes(), case.printed()
    last = printed.rstrip("\n").split("\n")[-1]
    if ended.status is None:
        return "hang", f"more than {SECONDS} s"
    if NO_MEMORY.search(printed) or ended.peak > usual + 1.1 * MEMORY:
        return "memory", f"{max(0, ended.peak - usual) >> 20} MiB more than usual; {last}"
    if os.WIFSIGNALED(ended.status):
        number, named = os.WTERMSIG(ended.status), notes.get("verified", 0) != 0
        own = number == signal.SIGBUS and named and case.kind in ("lmdb", "changed", "graphs")
        return "sigbus" if own else "crash", f"{signal.Signals(number).name}; verify named it: {named}"
    if ended.status or "Traceback (most recent call last)" in printed:
        return "traceback", last
    if notes.get("strewn"):
        return "strewn", str(notes["strewn"])
    if notes.get("wrong"):
        return "silent", f"what is there is wrong: {notes['wrong']}"
    named = notes.get("verified", 0) != 0
    if notes["code"] == 2 and SENTENCE.fullmatch(last) and last.isprintable():
        said = named or "verified" not in notes
        return ("refused", last) if said else ("silent", f"verify had nothing to say; {last}")
    if notes["code"] != 0:
        return "unsaid", f"exit code {notes['code']}; {last}"
    if all(notes.get(name) == good.get(name) for name in ("read", "result")):
        return "fine", "as without damage"
    if named:
        return "named", "trained on, with another result"
    return ("fine", "what was written") if notes.get("forged") else ("silent", "another result")


def attack(minutes=10, seed=0, rounds=None, only=None, number=None):
    """Run rounds of cases until the time is over -> figures; prints every failing case and a table.

    Args:
        minutes: no round begins after them.
        seed: of the cases; the same seed, kind and number make the same case.
        rounds: so many rounds at most; one is 20 stores, 10 inputs, 10 checkpoints and a kill -9.
        only: one of KINDS. number: of its cases this one alone, with all that it prints.
    """
    import torch._dynamo  # noqa: F401  Adam does it: once here instead of in every case

    began, workers = time.monotonic(), len(os.sched_getaffinity(0))
    table, failed, good, peaks = {kind: collections.Counter() for kind in KINDS}, [], {}, []

    def undamaged(case, ended):
        good[case.kind, case.number] = notes = case.notes()
        peaks.append(ended.peak)
        if ended.status != 0 or notes.get("code") or notes.get("verified") or notes.get("wrong"):
            raise RuntimeError(f"{case.kind} fails without damage: {notes} {case.printed()}")

    def done(case, ended):
        like = good.get((case.kind, -1 - case.model)) or good[case.kind, -1]
        outcome, line = judge(case, ended, like, max(peaks))
        table[case.kind][outcome] += 1
        found = dict(kind=case.kind, case=case.number, outcome=outcome, what=case.notes().get("what"), line=line[:300])
        if number is not None:
            print(case.printed(), *case.notes().items(), sep="\n")
        if outcome in FAILURES or number is not None:
            print(f"{case.kind} {case.number}: {outcome}: {found['what']}: {found['line']}", flush=True)
        failed.extend([found] if outcome in FAILURES else [])
        shutil.rmtree(case.folder, ignore_errors=True)

    with tempfile.TemporaryDirectory(prefix="attack-") as place:
        base = Path(place, "base")
        base.mkdir()

        def make(kind, number):
            return Case(kind, number, seed, base, Path(place, f"{kind}{number}"))

        run_all([(make("good", -1), prepare)], 1, undamaged)  # in a process of its own: this one stays without threads
        kinds, trained = [only] if only else KINDS, ("mmap", "lmdb", "changed", "damaged", "forged")
        first = [make(kind, -1 - i) for kind in kinds for i in range(len(MODELS) if kind in trained else 1)]
        run_all([(case, ATTACKS[case.group]) for case in first], workers, undamaged)
        seconds = {kind: notes["seconds"] for (kind, _), notes in good.items() if "seconds" in notes}
        (base / "seconds").write_text(json.dumps(seconds))
        one = [(only, number)] if number is not None else in_rounds(rounds, began + 60 * minutes, kinds)
        cases = (make(*numbered) for numbered in one)
        run_all(((case, ATTACKS[case.group]) for case in cases), workers, done)
    print_outcomes(table)
    outcomes = {group: {kind: dict(table[kind]) for kind in kinds} for group, kinds in GROUPS.items()}
    return {"attack_seconds": round(time.monotonic() - began, 1), "outcomes": outcomes, "failed": failed}


def in_rounds(rounds, until, chosen):
    """(kind, number) of the cases of the chosen kinds, round after round until a moment."""
    turn = 0
    while turn != rounds and time.monotonic() < until:
        for group, kinds in GROUPS.items():
            for i, (kind, count) in enumerate(kinds.items()):
                numbers = range(turn * count, (turn + 1) * count)
                if group == "kills":
                    numbers = [turn // len(kinds)] if turn % len(kinds) == i else []
                yield from ((kind, number) for number in numbers if kind in chosen)
        turn += 1


def prepare(case):
    """Make what is good; C code is compiled on the way."""
    make_good(case.base)
    train.main(command(case.base / "mmap", 1, "--checkpoint", case.base / "node.pt"))
    link = ["--scorer", "mlp", "--negatives", 2, "--early-stop", 5]
    train.main(command(case.base / "mmap", 1, *link, "--checkpoint", case.base / "link.pt", task="link"))


def print_outcomes(table):
    """Print how many cases of each kind, {kind: Counter}, ended how."""
    columns, rows = ["fine", "refused", "named", "sigbus", *FAILURES], []
    for group, kinds in GROUPS.items():
        counts = {kind: table[kind] for kind in kinds if table[kind]}
        if len(counts) > 1:
            counts[f"all {group}"] = sum(counts.values(), collections.Counter())
        for kind, count in counts.items():
            rows.append([kind, str(count.total()), *(str(count[column]) for column in columns)])
    print_table(rows, ["kind", "tried", *columns])


def bench_attack(args):
    """Attack for --minutes with --seed -> figures."""
    return attack(args.minutes, args.seed)


def main(argv=None):
    """Run the command line -> exit code: 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="no round begins after them (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default: 0)")
    parser.add_argument("--rounds", type=int, help="so many at most, of 20 stores, 10 inputs, 10 checkpoints, a kill")
    parser.add_argument("--only", choices=KINDS, metavar="KIND", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("--case", type=int, metavar="N", help="with --only: this case alone, with all that it prints")
    parser.add_argument("--json", metavar="FILE", help="write the figures here as well")
    args = parser.parse_args(argv)
    if args.case is not None and not args.only:
        parser.error(f"--case {args.case} needs --only KIND")
    figures = attack(args.minutes, args.seed, args.rounds, args.only, args.case)
    keep_figures(args, hardware(), figures)
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
