"""Command lines: words that are no flags; before the slow imports, what is missing, standard streams and Ctrl-C.

Needs only the standard library; older versions of Python than those that the other files need can run it.
"""

import argparse
import atexit
import difflib
import importlib.util
import os
import re
import signal
import sys

NEEDED = ("torch", "numpy", "tqdm")
MEANT = {  # what users of DGL, PyG and others type, a pattern: what to write here, the flag first
    "gpu|gpu-id|device|cuda": "--gpus 1 (CUDA_VISIBLE_DEVICES=N in front of python chooses GPU N), or --gpus 0 for CPU",
    "(num-)?neighbou?rs|num-samples": "--fanout 15,10,5",
    "hidden-(channels|dim|size|units)|(num|n)-hidden": "--hidden N",
    "(num|n|max)-epochs?": "--epochs N",
    "n-layers": "--num-layers N",
    "wd|l2": "--weight-decay X",
    "learning-rate": "--lr RATE",
    "patience": "--early-stop N",
    "save|save-.*|ckpt": "--checkpoint FILE",
    "load|load-.*": "--resume FILE",
    "(num-)?workers": "--sample-threads N (threads) and --prefetch N (batches ahead)",
    "(num-)?neg.*": "--negatives N",
    "amp|fp16|bf16": "--precision bf16",
    "(to-)?undirected|to-bidirected|add-reverse.*": "--symmetrize",
    "data|data-(path|dir|set)|graph": "--dataset NAME",
    "edge-times?": "--times COLUMN",
    "edge-weights?": "--weights COLUMN",
    "edge-types?": "--types COLUMN",
}


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and names the flag that an unknown word may mean."""

    missing = {}  # flag: what it takes, where that is missing

    def __init__(self, *args, **options):
        super().__init__(*args, allow_abbrev=False, **options)

    def parse_args(self, words=None):
        words = spelled_out(sys.argv[1:] if words is None else map(str, words))
        args, unknown = self.parse_known_args(words)
        if unknown:
            flag = next((word for word in unknown if word.startswith("-")), unknown[0])
            name = flag.partition("=")[0]
            self.error(self.missing.get(name) or f"{name} is no flag{self._meant(name, args)}")
        return args

    def _meant(self, flag, args):
        """Return the end of a sentence: what to write in place of an unknown flag, if that is clear."""
        known = [*self._option_string_actions]
        if self._subparsers:
            chosen = self._subparsers._group_actions[0].choices[args.command]
            known = [*chosen._option_string_actions]
        name = flag.lower()
        for pattern, meant in MEANT.items():
            if re.fullmatch(f"--?({pattern})", name) and meant.split()[0] in known:
                return f": write {meant}"
        close = [other for other in known if other.startswith(name)]
        close = close or difflib.get_close_matches(name, known, 1, 0.75)
        return f": did you mean {' or '.join(close)}?" if close else "; --help lists them"


def spelled_out(words):
    """Normalise the words: --batch_size 8 -> --batch-size 8; --gpu-cache (DGL's name) -> --cache;
    --fanout -1,5 -> --fanout=-1,5, as argparse takes -1,5 for a flag, and --fanout 5 5 -> "--fanout=5 5"."""
    spelled = []
    for word in words:
        before = spelled[-1] if spelled else ""
        if before == "--fanout":
            spelled[-1] += f"={word}"
        elif before.startswith("--fanout=") and re.match("-?[0-9]", word):
            spelled[-1] += f" {word}"
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-").replace("--gpu-cache", "--cache")
            spelled.append(name + equals + value)
        else:
            spelled.append(word)
    return spelled


def begin():
    """End with one line where Python is too old or a library is missing. Replace closed standard streams by /dev/null:
    their numbers would go to files or pipes, into which libraries would print, and errors to stdout. Characters that
    stdout's encoding lacks, as a path may have, are escaped. Until `ready`, Ctrl-C ends the process without a traceback."""
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit(f"Python {sys.version.split()[0]} is too old: Python 3.10 to 3.13 are needed")
    if missing := [name for name in NEEDED if not importlib.util.find_spec(name)]:
        sys.exit(
            f"{', '.join(missing)} cannot be imported by this Python: "
            f"{sys.executable} -m pip install -r requirements.txt"
        )
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w")
    sys.stderr = sys.stderr or open(2, "w")
    # in a POSIX locale that is no UTF-8 Python writes bytes of paths as they are, and fails at other characters
    if sys.stdout.errors == "strict" or sys.stdout.encoding.lower() in ("ascii", "us-ascii"):
        sys.stdout.reconfigure(errors="backslashreplace")
        os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:backslashreplace"  # for ranks
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def ready():
    """Make Ctrl-C raise KeyboardInterrupt again, until the interpreter exits."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
