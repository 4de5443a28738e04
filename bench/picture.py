"""python -m bench picture: bars of every contender's rate per second, from the other commands' results."""

from bench import tools
from disk.files import StoreError

DRAWN = [
    f"results/{name}.json"
    for name in ("sampler-cpu", "step-cpu", "inference-cpu", "gpu-h200", "gpu")
]
PICTURE = "results/throughput.png"
CHARTS = {  # command, or part of gpu: title
    "sampler": "sampling a batch",
    "step": "a training step, dropout 0.5",
    "inference": "exact inference, all nodes",
    "sampling": "sampling a batch",
    "steps": "a training step, dropout 0.5",
}
LABELS = {  # contenders that are drawn, beside DGL's
    "native": "ringblock",
    "torch ops": "ringblock, torch ops",
    "torch operations": "ringblock, torch ops",
    "all tricks": "ringblock, fp32",
    "bf16": "ringblock, bf16",
    "ours": "ringblock",
    "ours, tables in files": "ringblock, tables in files",
    "sage tf32": "ringblock, tf32",
    "sage bf16": "ringblock, bf16",
    "plain torch operations, fp32": "ringblock, torch ops, fp32",
}
CUGRAPH = {  # contenders of the part cugraph of gpu: (the chart they belong to, label)
    "sampling, an epoch in a call (its default)": ("sampling", "cuGraph-PyG"),
    "training, tf32, trim_to_layer": ("steps", "cuGraph-PyG, tf32"),
    "training, fp32, trim_to_layer": ("steps", "cuGraph-PyG, fp32"),
}


def times_in(content):
    """Return what can be drawn of a result file -> {title: {label: milliseconds}, the fastest first}."""
    charts = {}
    where = ""
    entries = {content.get("arguments", {}).get("what"): content}
    if "parts" in content:
        where = f", {content['machine'].get('gpu')}"
        entries = content["parts"]
    for what, title in CHARTS.items():
        times = {}
        for name, row in entries.get(what, {}).get("contenders", {}).items():
            theirs = name.startswith(("DGL ", "DGL, ")) and "no dropout" not in name
            if theirs or name in LABELS:
                times[LABELS.get(name, name)] = row["median_ms"]
        for name, row in entries.get("cugraph", {}).get("contenders", {}).items():
            chart, label = CUGRAPH.get(name, ("", ""))
            if times and chart == what:
                times[label] = row["median_ms"]
        if times:
            charts[title + where] = dict(sorted(times.items(), key=lambda pair: pair[1]))
    return charts


def bench_picture(args):
    """Draw the throughput beside DGL's from result files -> {}."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    on_gpu = {}
    on_cpu = {}
    for file in DRAWN:
        content = tools.read_json(file)
        row = on_gpu if "parts" in content else on_cpu
        row |= times_in(content)
    rows = [row for row in (on_gpu, on_cpu) if row]
    if not rows:
        raise StoreError(f"nothing to draw in {DRAWN}: bench sampler, step and others write it")
    columns = max(map(len, rows))
    options = {"figsize": (4.2 * columns, 2.4 * len(rows)), "layout": "constrained"}
    figure, axes = pyplot.subplots(len(rows), columns, squeeze=False, **options)
    charts = []
    for row, line in zip(rows, axes):
        for axis in line[len(row) :]:
            axis.set_axis_off()
        charts += zip(line, row.items())
    for axis, (title, times) in charts:
        colors = ["C0" if name.startswith("ringblock") else "C7" for name in times]
        bars = axis.barh(list(times), [1e3 / ms for ms in times.values()], color=colors)
        texts = [f" {ms:,.0f} ms" if ms >= 100 else f" {ms:.3g} ms" for ms in times.values()]
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
