"""python -m bench picture: times a second of every contender as bars, from what the other commands wrote."""

import json
from pathlib import Path

from disk.files import StoreError

DRAWN = [f"results/{name}.json" for name in ("sampler-cpu", "step-cpu", "inference-cpu", "gpu")]
DGL = ["DGL fused, int64", "DGL unfused, int64"], ["DGL, malloc kept", "DGL as shipped"]
CHUNKS = [f"DGL, {n} nodes at a time" for n in (65536, 4096)]
ON_GPU = [
    f"{precision} {how}" for precision in ("fp32", "tf32", "bf16") for how in ("eager", "graph")
]
CHARTS = {  # command, or part of gpu: (title, entry with the times, its unit in milliseconds, contenders)
    "sampler": ("sampling a batch", "contenders", 1, ["native", "torch ops", *DGL[0]]),
    "step": ("a training step, dropout 0.5", "median_ms", 1, ["bf16", "all tricks", *DGL[1]]),
    "inference": (
        "exact inference, all nodes",
        "median_s",
        1000,
        ["ours", "ours, tables in files", *CHUNKS],
    ),
    "sampling": ("sampling a batch", "median_ms", 1, ["native", "torch operations"]),
    "products": (
        "a training step, dropout 0.5",
        "contenders",
        1,
        [*(f"cuda-cuda {how}" for how in ON_GPU), "cuda-cuda fp32 plain"],
    ),
}
LABELS = {  # of a contender; its own name if it has none
    "native": "ringblock",
    "torch ops": "ringblock, torch ops",
    "torch operations": "ringblock, torch ops",
    "all tricks": "ringblock, fp32",
    "bf16": "ringblock, bf16",
    "ours": "ringblock",
    "ours, tables in files": "ringblock, tables in files",
    "cuda-cuda fp32 plain": "plain version, fp32",
    **{f"cuda-cuda {how}": f"ringblock, {how}" for how in ON_GPU},
}


def times_in(content):
    """What a result file holds that can be drawn -> [(title, {label: milliseconds})]."""
    if "parts" in content:
        entries, where = content["parts"], f", {content['machine'].get('gpu')}"
    else:
        entries, where = {content["arguments"]["what"]: content}, ""
    charts = []
    for what, (title, entry, unit, names) in CHARTS.items():
        times, there = {}, entries.get(what, {}).get(entry, {})
        for name in names:
            if name in there:
                value = there[name]
                ms = (
                    value
                    if isinstance(value, float)
                    else value.get("median_ms") or value["step_ms"]
                )
                times[LABELS.get(name, name)] = unit * ms
        charts += [(title + where, times)] if times else []
    return charts


def bench_picture(args):
    """Draw times against DGL from result files -> results/throughput.png, or --png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files, charts = args.files or [file for file in DRAWN if Path(file).exists()], {}
    for file in files:
        for title, times in times_in(json.loads(Path(file).read_text())):
            if title in charts:
                raise StoreError(
                    f"{file}: {title} is in a file before it as well; give one of them"
                )
            charts[title] = times
    if not charts:
        raise StoreError(
            f"nothing to draw in {files}: give what python -m bench sampler, step, inference or gpu wrote"
        )
    size = 4.2 * len(charts), 2.4
    figure, axes = pyplot.subplots(
        1, len(charts), figsize=size, layout="constrained", squeeze=False
    )
    for axis, (title, times) in zip(axes[0], charts.items()):
        colors = ["C0" if name.startswith("ringblock") else "C7" for name in times]
        bars = axis.barh(list(times), [1e3 / ms for ms in times.values()], color=colors)
        texts = [f" {ms:.{(ms < 100) + (ms < 10)}f} ms" for ms in times.values()]
        axis.bar_label(bars, texts, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.25)
        axis.tick_params(labelsize=8)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("times a second (longer is faster)", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    path = args.png or "results/throughput.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"drawn: {path}")
    return {}
