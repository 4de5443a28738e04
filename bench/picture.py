"""python -m bench picture: bars of every contender's rate per second, from the other commands' results."""

from bench import tools
from disk.files import StoreError

DRAWN = [f"results/{name}.json" for name in ("sampler-cpu", "step-cpu", "inference-cpu", "gpu")]
PICTURE = "results/throughput.png"
CHARTS = {  # command, or part of gpu: title
    "sampler": "sampling a batch",
    "step": "a training step, dropout 0.5",
    "inference": "exact inference, all nodes",
    "sampling": "sampling a batch",
    "products": "a training step, dropout 0.5",
}
LABELS = {  # contenders that are drawn, beside DGL's and those in GPU memory
    "native": "ringblock",
    "torch ops": "ringblock, torch ops",
    "torch operations": "ringblock, torch ops",
    "all tricks": "ringblock, fp32",
    "bf16": "ringblock, bf16",
    "ours": "ringblock",
    "ours, tables in files": "ringblock, tables in files",
    "cuda-cuda fp32 plain": "plain version, fp32",
}


def times_in(content):
    """Return what can be drawn of a result file -> {title: {label: milliseconds}, the fastest first}."""
    entries, where, charts = {content.get("arguments", {}).get("what"): content}, "", {}
    if "parts" in content:
        entries, where = content["parts"], f", {content['machine'].get('gpu')}"
    for what, title in CHARTS.items():
        times = {}
        for name, row in entries.get(what, {}).get("contenders", {}).items():
            theirs = name.startswith(("DGL ", "DGL, ")) and "no dropout" not in name
            if theirs or name in LABELS or name.startswith("cuda-cuda"):
                label = LABELS.get(name, name.replace("cuda-cuda ", "ringblock, "))
                times[label] = row["median_ms"]
        if times:
            charts[title + where] = dict(sorted(times.items(), key=lambda pair: pair[1]))
    return charts


def bench_picture(args):
    """Draw the throughput beside DGL's from result files -> {}."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    charts = {}
    for file in DRAWN:
        charts |= times_in(tools.read_json(file))
    if not charts:
        raise StoreError(f"nothing to draw in {DRAWN}: bench sampler, step and others write it")
    options = {"figsize": (4.2 * len(charts), 2.4), "layout": "constrained", "squeeze": False}
    figure, axes = pyplot.subplots(1, len(charts), **options)
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
    figure.savefig(PICTURE, dpi=110)
    pyplot.close(figure)
    print(f"drawn: {PICTURE}")
    return {}
