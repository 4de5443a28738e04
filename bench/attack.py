"""python -m bench attack: damage what this project reads, kill it at work, plant links, and count what comes of it.

    python -m bench attack --minutes 10
    python -m bench attack --only lmdb --case 417          # one case again, with all that it printed

A case is made from (seed, kind, number) alone and runs in a forked process with bounded memory and time:

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

import collections
import itertools
import json
import multiprocessing
import multiprocessing.connection
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
from typing import NamedTuple

import numpy as np
import torch

import store
from bench.tools import end_with_the_parent, kill_group, print_table
from bench.victims import ATTACKS, MODELS, make_good
from disk.files import StoreError
from run import plan
from sources import arrays

GROUPS = {  # cases of each kind in a round; of the kills one kind a round
    "stores": {"mmap": 5, "lmdb": 5, "changed": 5, "graphs": 5},
    "inputs": {"npz": 3, "csv": 3, "molecules": 2, "crystals": 2},
    "checkpoints": {"damaged": 5, "forged": 5},
    "kills": {"build": 1, "put": 1, "append": 1, "train": 1},
}
KINDS = {kind: group for group, kinds in GROUPS.items() for kind in kinds}
FOR_EVERY_MODEL = ("mmap", "lmdb", "changed", "damaged", "forged")
FAILURES = ("crash", "traceback", "hang", "memory", "silent", "unsaid", "strewn")
OUTCOMES = ("fine", "refused", "named", "sigbus", *FAILURES)
SECONDS = 60  # of a case
MEMORY = 3 << 28  # bytes beyond those of a case without damage; and what is free, as a case is told
ADDRESSES = 6 << 30  # bytes of address space: LMDB and threads reserve some that they never take
OURS = "notes printed victim store built plain bad.pt out.pt out.npy csv npz.npz molecules.npz crystals.npz"


class Case(NamedTuple):
    """One case. Where nothing is to be wrong, for comparison, its number is -1 - i for the model i."""

    kind: str
    number: int
    base: Path  # folder of what is good
    folder: Path  # its own, in which it runs
    seed: int = 0

    def random(self):
        """The random numbers of the case; None where nothing is to be wrong."""
        key = [self.seed, zlib.crc32(self.kind.encode()), self.number]
        return np.random.default_rng(key) if self.number >= 0 else None

    def model(self):
        """Number of its entry in MODELS."""
        return self.number % len(MODELS) if self.number >= 0 else -1 - self.number

    def note(self, **facts):
        """Write down what is known, in case this process ends."""
        with open(self.folder / "notes", "a") as file:
            file.write(json.dumps(facts) + "\n")

    def notes(self):
        """All that was written down, and what lies where nothing belongs -> dict."""
        notes = {}
        for line in (self.folder / "notes").read_text().splitlines():
            notes |= json.loads(line)
        strewn = {file.name for file in self.folder.iterdir()} - set(OURS.split())
        victim = self.folder / "victim"
        if not victim.is_file() or victim.read_bytes() != b"untouched":
            strewn.add("victim")
        return notes | {"strewn": sorted(strewn | set(notes.get("strewn", [])))}


def run_all(cases, workers):
    """Run cases, some at a time, and yield (case, exit code; None: it took too long) as they end."""
    running, cases = {}, iter(cases)
    while True:
        while len(running) < workers and (case := next(cases, None)):
            shutil.rmtree(case.folder, ignore_errors=True)
            case.folder.mkdir()
            process = multiprocessing.get_context("fork").Process(target=inside, args=(case,))
            process.start()
            running[process] = case, time.monotonic() + SECONDS
        if not running:
            return
        multiprocessing.connection.wait([process.sentinel for process in running], 1)
        for process, (case, end) in list(running.items()):
            code, late = process.exitcode, time.monotonic() > end
            if code is not None or late:
                kill_group(process)
                del running[process]
                yield case, code


def inside(case):
    """Work on a case in its folder, in bounded memory; what is printed goes into a file."""
    os.setsid()
    end_with_the_parent()
    os.chdir(case.folder)
    Path("victim").write_text("untouched")
    case.note(code=None)
    printed = open("printed", "w", buffering=1)
    for number in (1, 2):
        os.dup2(printed.fileno(), number)
    sys.stdout = sys.stderr = printed
    torch.set_num_threads(1)
    for module in (arrays, plan, store):
        module.free_host_bytes = lambda: MEMORY
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ADDRESSES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    (make_good if case.kind == "good" else ATTACKS[KINDS[case.kind]])(case)
    case.note(peak=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


NO_MEMORY = re.compile("MemoryError|allocate|bad_alloc")
SENTENCE = re.compile(r"\S+: (error: )?\S.{,1000}")  # and printable


def judge(case, code, good, usual):
    """What came of a case -> (outcome, a line about it).

    Args:
        code: how its process ended. good: notes of the same case without damage. usual: bytes of memory that it takes.
    """
    notes, printed = case.notes(), (case.folder / "printed").read_text(errors="replace")
    last, named = printed.rstrip("\n").split("\n")[-1], notes.get("verified", 0) != 0
    if code is None:
        return "hang", f"more than {SECONDS} s"
    if NO_MEMORY.search(printed) or notes.get("peak", 0) > usual + 1.1 * MEMORY:
        return "memory", f"{(notes.get('peak', 0) - usual) >> 20} MiB more than usual; {last}"
    if code < 0:
        own = code == -signal.SIGBUS and named and case.kind in ("lmdb", "changed", "graphs")
        return "sigbus" if own else "crash", f"{signal.Signals(-code).name}; verify: {named}"
    if code or "Traceback (most recent call last)" in printed:
        return "traceback", last
    if notes["strewn"]:
        return "strewn", str(notes["strewn"])
    if notes.get("wrong"):
        return "silent", f"what is there is wrong: {notes['wrong']}"
    if notes["code"] in (1, 2) and SENTENCE.fullmatch(last) and last.isprintable():
        # 1: a loss that is not finite, of numbers that were written so
        said = named or "verified" not in notes or notes["code"] == 1 and notes.get("forged")
        return ("refused", last) if said else ("silent", f"verify had nothing to say; {last}")
    if notes["code"] != 0:
        return "unsaid", f"exit code {notes['code']}; {last}"
    if notes.get("result") == good.get("result"):
        return "fine", "as without damage"
    if named:
        return "named", "trained on, with another result"
    return ("fine", "what was written") if notes.get("forged") else ("silent", "another result")


def undamaged(make, kinds, workers):
    """Run the kinds of cases without damage -> ({(kind, number): notes}, bytes of memory that one takes)."""
    good, first = {}, []
    for kind in kinds:
        first += [make(kind, -1 - i) for i in range(len(MODELS) if kind in FOR_EVERY_MODEL else 1)]
    for case, code in itertools.chain(run_all([make("good", -1)], 1), run_all(first, workers)):
        good[case.kind, case.number] = notes = case.notes()
        if code or any(notes.get(name) for name in ("code", "verified", "wrong", "strewn")):
            printed = (case.folder / "printed").read_text()
            raise RuntimeError(f"{case.kind} fails without damage: {notes} {printed}")
    seconds = {kind: notes["seconds"] for (kind, _), notes in good.items() if "seconds" in notes}
    (case.base / "seconds").write_text(json.dumps(seconds))
    return good, max(notes["peak"] for notes in good.values())


def in_rounds(rounds, until, chosen):
    """(kind, number) of the cases of the chosen kinds, round after round until a moment."""
    for turn in itertools.count():
        if turn == rounds or time.monotonic() > until:
            return
        for group, kinds in GROUPS.items():
            for i, (kind, count) in enumerate(kinds.items()):
                numbers = range(turn * count, (turn + 1) * count)
                if group == "kills":
                    numbers = [turn // len(kinds)] if turn % len(kinds) == i else []
                yield from ((kind, number) for number in numbers if kind in chosen)


def bench_attack(args):
    """Run rounds of cases until --minutes are over -> figures; prints every failing case and a table."""
    import torch._dynamo  # noqa: F401  Adam does it: once here instead of in every case

    if args.only and args.only not in KINDS or args.case is not None and not args.only:
        raise StoreError(f"--only {args.only}: one of {', '.join(KINDS)}; --case N needs it")
    began, workers = time.monotonic(), len(os.sched_getaffinity(0))
    kinds, failed = [args.only] if args.only else list(KINDS), []
    ends = {kind: collections.Counter() for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="attack-") as place:
        place = Path(place)
        (place / "base").mkdir()

        def make(kind, number):
            return Case(kind, number, place / "base", place / f"{kind}{number}", args.seed)

        good, usual = undamaged(make, kinds, workers)
        cases = in_rounds(args.rounds, began + 60 * args.minutes, kinds)
        cases = [(args.only, args.case)] if args.case is not None else cases
        for case, code in run_all((make(*one) for one in cases), workers):
            like = good.get((case.kind, -1 - case.model())) or good[case.kind, -1]
            outcome, line = judge(case, code, like, usual)
            ends[case.kind][outcome] += 1
            what = case.notes().get("what")
            if outcome in FAILURES or args.case is not None:
                print(f"{case.kind} {case.number}: {outcome}: {what}: {line[:300]}", flush=True)
                failed.append([case.kind, case.number, outcome, what, line[:300]])
            if args.case is not None:
                print((case.folder / "printed").read_text(errors="replace"), case.notes())
            shutil.rmtree(case.folder, ignore_errors=True)
    rows, outcomes = {}, {}
    for group, some in GROUPS.items():
        outcomes[group] = {kind: dict(ends[kind]) for kind in some}
        ends[f"all {group}"] = sum((ends[kind] for kind in some), collections.Counter())
        for kind in (*some, f"all {group}"):
            if tried := ends[kind].total():
                rows[kind] = {"tried": tried} | {end: ends[kind][end] for end in OUTCOMES}
    print_table("kind", rows)
    seconds = round(time.monotonic() - began, 1)
    return {"attack_seconds": seconds, "outcomes": outcomes, "failed": failed}
