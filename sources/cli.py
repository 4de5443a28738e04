"""The command line of store.py: build a store from files, print what is in it, verify it, split it.

    python store.py build edges.csv.gz PATH --features x.csv.gz --labels y.csv --symmetrize
    python store.py info PATH       # sizes, degrees, options, source
    python store.py verify PATH     # every checksum
    python store.py split PATH 4    # into parts for four machines

Exit codes: 0 fine, 1 damaged, 2 no store or bad input, 141 if the output pipe is closed.
"""

import contextlib
import os
import sys
from pathlib import Path

from disk import terminal

if __name__ == "__main__":
    terminal.begin()

import store
from disk import files
from disk.columns import COLUMNS
from disk.convert import KEPT_AS
from disk.files import SPLITS, StoreError
from extras import MissingExtra, extra
from sources.prepare import build

TABLES = {  # flag of build: what it takes, help
    "--features": ("FILE", "tables: a row of numbers per node"),
    "--labels": ("FILE", "tables: a label per node, -1 if unlabelled"),
    "--targets": ("FILE", "tables: numbers to learn per node, empty if missing"),
    **{f"--{part}": ("FILE", f"tables: ids of the {part} nodes") for part in SPLITS},
    **{f"--{c.flag.replace('_', '-')}": c.usage() for c in COLUMNS.values() if not c.asked},
}


def make_parser():
    """Return the parser: one sub-command per action, with its own flags, so that another one's flags are refused."""
    parser = terminal.Parser(prog="store.py", description="Build or read a graph store.")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("build", help="write a store from files").add_argument
    add(
        "source",
        nargs="+",
        help="an .npz file, PyG data saved as .pt, or a table of edges (csv or parquet); or for several types "
        "tables TYPE=FILE of nodes and TYPE,RELATION,TYPE=FILE of edges",
    )
    add("path", help="directory of the store")
    for flag, (kind, text) in TABLES.items():
        add(flag, metavar=kind, help=text)
    add(
        "--ignore",
        type=lambda names: names.split(","),
        default=(),
        metavar="A,B",
        help="leave out columns of tables, or arrays of an .npz file",
    )
    add(
        "--backend",
        default="mmap",
        choices=[*store.BACKENDS],
        help="feature storage (default mmap)",
    )
    add(
        "--feature-dtype",
        choices=KEPT_AS,
        help="round float features to this type (int8: to 256 values a column)",
    )
    add("--symmetrize", action="store_true", help="add the reverse of every edge")
    add("--drop-self-loops", action="store_true", help="leave out edges from a node to itself")
    add("--drop-duplicates", action="store_true", help="keep one of several equal edges")
    add("--edge-order", action="store_true", help="keep the number of each edge in the order given")
    add("--seed", type=int, help="draws the split if there is none (default: that of each run)")
    for name, text in (
        ("info", "print sizes, degrees, options, source"),
        ("verify", "compare every byte with its checksum"),
    ):
        commands.add_parser(name, help=text).add_argument("path", help="directory of the store")
    add = commands.add_parser("split", help="cut into parts for several machines").add_argument
    add("path", help="directory of the store")
    add("count", type=int, help="number of parts")
    add(
        "target",
        nargs="?",
        help="directory of the parts, part-0, part-1, ... (default: PATH.parts)",
    )
    return parser


def run(command, path, **options) -> int:
    """Run a sub-command -> its exit code."""
    if command == "build":
        split = {part: file for part in SPLITS if (file := options.pop(part))}
        source = by_type(options.pop("source"))
        build(source, path, split=split, progress=True, **options)
    if command == "split":
        parts = extra(".parts", "split")
        target = parts.split(path, progress=True, **options)
        for part in sorted(target.iterdir(), key=lambda part: int(part.name[5:])):
            print(f"{part}: {parts.described_part(store.GraphStore.open(part))}")
        return 0
    meta = {}
    with contextlib.suppress(StoreError):  # info and verify below report what is wrong
        meta = files.read_meta(path)
    graphs = meta.get("format") == "ringblock-graphs"
    kind = extra(".graph_store", path) if graphs else store
    if command == "verify":
        return print_problems(path, meta, kind.verify(path))
    print(kind.info(path))
    return 0


def by_type(words):
    """Return the only source, or {type: file} of several TYPE=FILE."""
    if len(words) == 1:
        return words[0]
    sources = dict(word.partition("=")[::2] for word in words)
    if len(sources) < len(words) or not all(sources.values()):
        raise StoreError(
            f"{' '.join(words)}: "
            "several tables are TYPE=FILE of nodes and TYPE,RELATION,TYPE=FILE of edges, one a type"
        )
    return sources


def print_problems(path, meta, problems) -> int:
    """Print a line for each file of a store, good or bad, and for others in its directory -> exit code."""
    bad = {problem.partition(":")[0]: problem for problem in reversed(problems)}
    # a damaged meta.json does not tell which files belong to the store
    names = {"meta.json", *meta["files"]} if meta and "meta.json" not in bad else set()
    if not problems and "part" in meta:
        print("--  part {} of {}, counted from 0".format(*meta["part"]))
    for name in sorted(names | bad.keys()):
        print(f"BAD {bad[name]}" if name in bad else f"OK  {name}")
    if names:
        for entry in sorted(Path(path).iterdir()):
            # LMDB's lock file exists while processes use it
            if entry.name not in names and not entry.name.endswith("-lock"):
                print(f"--  {entry.name}: not part of the store, not looked at")
    return 1 if problems else 0


def main(argv=None) -> int:
    """Run the command line -> exit code."""
    try:
        code = run(**vars(make_parser().parse_args(argv)))
        print(end="", flush=True)
        return code
    except (StoreError, MissingExtra) as error:
        print(f"store.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return files.unread(error)


if __name__ == "__main__":
    terminal.ready()
    code = main()
    with contextlib.suppress(OSError):
        print(end="", flush=True)
    # at once: threads of pyarrow that still read a refused table abort a slower exit
    os._exit(code)
