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
from bench.tools import end_with_the_parent, in_groups, print_table
from bench.victims import ATTACKS, MODELS, make_good
from disk.files import StoreError
from run import plan
from sources import arrays

FAILURES = ("crash", "traceback", "hang", "memory", "silent", "unsaid", "strewn")
OUTCOMES = ("fine", "refused", "named", "sigbus", *FAILURES)
SECONDS = 60  # of a case
MEMORY = 3 << 28  # bytes beyond those of a case without damage; and what is free, as a case is told
ADDRESSES = 6 << 30  # bytes of address space: LMDB and threads reserve some that they never take
OURS = "notes printed victim store built plain bad.pt out.pt out.npy csv npz.npz molecules.npz crystals.npz"
NO_MEMORY = re.compile("MemoryError|allocate|bad_alloc")
SENTENCE = re.compile(r"\S+: (error: )?\S.{,1000}")  # and printable


class Case(NamedTuple):
    """One case. Where nothing is to be wrong, for comparison, its number is negative."""

    kind: str
    number: int
    base: Path  # folder of what is good
    folder: Path  # its own, in which it runs
    seed: int = 0
    usual: float = 0.0  # seconds of the work that is killed

    def random(self):
        """The random numbers of the case; None where nothing is to be wrong."""
        key = [self.seed, zlib.crc32(self.kind.encode()), self.number]
        return np.random.default_rng(key) if self.number >= 0 else None

    def model(self):
        """Number of its entry in MODELS."""
        return self.number % len(MODELS)

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

    def printed(self):
        """All that it printed."""
        return (self.folder / "printed").read_text(errors="replace")


def run_all(cases, workers):
    """Run cases, some at a time, and yield (case, exit code; None: it took too long) as they end."""
    return in_groups(inside, cases, lambda case: SECONDS, workers)


def inside(case):
    """Work on a case in its folder, in bounded memory; what is printed goes into a file."""
    end_with_the_parent()
    shutil.rmtree(case.folder, ignore_errors=True)
    case.folder.mkdir()
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
    make_good(case) if case.kind == "good" else ATTACKS[case.kind][1](case)
    case.note(peak=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def judge(case, code, good, usual):
    """What came of a case -> (outcome, a line about it).

    Args:
        code: how its process ended. good: notes of the same case without damage. usual: bytes of memory that it takes.
    """
    notes, printed = case.notes(), case.printed()
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
    """Run the kinds of cases without damage, with every model -> {(kind, model): notes}."""
    good, first = {}, [make(kind, -1 - i) for kind in kinds for i in range(len(MODELS))]
    for case, code in itertools.chain(run_all([make("good", -1)], 1), run_all(first, workers)):
        good[case.kind, case.model()] = notes = case.notes()
        if code or any(notes.get(name) for name in ("code", "verified", "wrong", "strewn")):
            raise RuntimeError(f"{case.kind} fails without damage: {notes} {case.printed()}")
    return good


def bench_attack(args):
    """Run rounds of cases until --minutes are over -> figures; prints every failing case and a table."""
    import torch._dynamo  # noqa: F401  Adam does it: once here instead of in every case

    if args.only and args.only not in ATTACKS or args.case is not None and not args.only:
        raise StoreError(f"--only {args.only}: one of {', '.join(ATTACKS)}; --case N needs it")
    began, workers = time.monotonic(), len(os.sched_getaffinity(0))
    kinds, failed = [args.only] if args.only else list(ATTACKS), []
    ends, good = {kind: collections.Counter() for kind in kinds}, {}
    with tempfile.TemporaryDirectory(prefix="attack-") as place:
        place = Path(place)
        (place / "base").mkdir()

        def make(kind, number):
            usual = good.get((kind, number % len(MODELS)), {}).get("seconds", 0.0)
            paths = place / "base", place / f"{kind}{number}"
            return Case(kind, number, *paths, args.seed, usual)

        def in_rounds():
            for turn in itertools.count():
                if turn == args.rounds or time.monotonic() > began + 60 * args.minutes:
                    return
                for kind in kinds:
                    share = ATTACKS[kind][0]
                    for number in range(int(turn * share), int((turn + 1) * share)):
                        yield make(kind, number)

        good |= undamaged(make, kinds, workers)
        usual = max(notes["peak"] for notes in good.values())
        cases = in_rounds() if args.case is None else [make(args.only, args.case)]
        for case, code in run_all(cases, workers):
            outcome, line = judge(case, code, good[case.kind, case.model()], usual)
            ends[case.kind][outcome] += 1
            what = case.notes().get("what")
            if outcome in FAILURES or args.case is not None:
                print(f"{case.kind} {case.number}: {outcome}: {what}: {line[:300]}", flush=True)
            if outcome in FAILURES:
                failed.append([case.kind, case.number, outcome, what, line[:300]])
            if args.case is not None:
                print(case.printed(), case.notes())
            shutil.rmtree(case.folder, ignore_errors=True)
    rows = {
        kind: {"tried": ends[kind].total()} | {outcome: ends[kind][outcome] for outcome in OUTCOMES}
        for kind in kinds
    }
    print_table("kind", rows)
    return {"attack_seconds": time.monotonic() - began, "outcomes": rows, "failed": failed}
