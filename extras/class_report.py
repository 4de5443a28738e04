"""Scores by class: --report FILE.csv, precision, recall, F1 and the confusion matrix; of targets their errors. FILE.png draws
the matrix.

    python train.py --report classes.csv
    python train.py --resume run.pt --report matrix.png
"""

import csv
import io

import torch

from disk.files import SPLITS, plural, write_whole
from extras import extra
from tasks.metrics import errors, predictions

MOST = 30  # classes whose names and counts are drawn


def confusion(outputs, y):
    """Count logits [n, C] by label and prediction -> int64 [C, C], of a row's class as the column's; of several labels, 0
    and 1 each, [C, 2, 2]. Missing labels are left out."""
    predicted = predictions(outputs, y).long()
    C = outputs.shape[1]
    width = C if y.dim() == 1 else 2
    cells = y.long() * width + predicted
    shape = width, width
    if y.dim() > 1:
        cells += 4 * torch.arange(C)
        shape = C, 2, 2
    return cells[y >= 0].bincount(minlength=torch.Size(shape).numel()).view(shape)


def by_class(counts, names):
    """Yield a row for each class or label, a dict, of the `confusion` of a part. names: of the classes."""
    several = counts.dim() == 3
    hits = counts[:, 1, 1] if several else counts.diag()
    actual = counts[:, 1].sum(1) if several else counts.sum(1)
    predicted = counts[:, :, 1].sum(1) if several else counts.sum(0)
    columns = ["as 0", "as 1"] if several else [f"as {name}" for name in names]
    for j, name in enumerate(names):
        hit, n, m = (int(of[j]) for of in (hits, actual, predicted))
        row = {"class": name, "precision": hit / max(m, 1), "recall": hit / max(n, 1)}
        row |= {"f1": 2 * hit / max(n + m, 1), "count": n}
        of_class = counts[j, 1] if several else counts[j]
        yield row | dict(zip(columns, of_class.tolist()))


def by_target(outputs, y, names):
    """Yield a row for each target, a dict, of outputs and y [n, T]."""
    for j, name in enumerate(names):
        output, target = outputs[:, j : j + 1], y[:, j : j + 1]
        row = {"target": name, "count": int((~target.isnan()).sum())}
        scores = errors(output, target, target.nanmean(0)) if row["count"] else {}
        yield row | {of: scores.get(of) for of in ("rmse", "mae", "r2")}


def write(task, path, outputs):
    """Write --report of the exact outputs [V, C] of all nodes; a picture is of the test part, or of the last part with nodes."""
    store = task.store
    C = outputs.shape[1]
    names = [*(store.class_names or [])[:C], *range(len(store.class_names or []), C)]
    parts = {part: store.split[part] for part in SPLITS[::-1] if len(store.split[part])}
    if not parts:
        print(f"report  {store.path} has no labels in its split: {path} is not written")
    elif path.endswith(".png"):
        part, ids = next(iter(parts.items()))
        draw(path, confusion(outputs[ids], store.labels[ids]), names, f"{part}, {len(ids):,} nodes")
        print(f"wrote {path}: confusion matrix of {part}")
    else:
        rows = []
        for part, ids in parts.items():
            of_part = outputs[ids], store.labels[ids]
            of = (
                by_target(*of_part, names)
                if store.targets
                else by_class(confusion(*of_part), names)
            )
            rows += [{"part": part, **row} for row in of]
        text = io.StringIO()
        table = csv.DictWriter(text, rows[0])
        table.writeheader()
        table.writerows(rows)
        write_whole(path, lambda file: file.write(text.getvalue().encode()))
        print(f"wrote {path}: {plural(len(rows), 'row')} of {', '.join([*rows[0]][:6])}, ...")


def draw(path, counts, names, title):
    """Draw a confusion matrix [C, C] to a .png file: shares of each class, with counts."""
    from matplotlib.figure import Figure

    C = len(counts)
    size = 2 + 0.5 * min(C, MOST)
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axis = figure.subplots()
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="share of the class")
    if C <= MOST:
        axis.set_xticks(range(C), names, rotation=90)
        axis.set_yticks(range(C), names)
        for i, j in counts.nonzero().tolist():
            color = "white" if shares[i, j] > 0.5 else "black"
            axis.text(j, i, f"{counts[i, j]:,}", ha="center", va="center", color=color, fontsize=8)
    axis.set_xlabel("predicted class")
    axis.set_ylabel("class")
    axis.set_title(title)
    extra(".pictures", "--report FILE.png").write_picture(path, figure)


def flags(kinds):
    """Declare the flag of the report."""

    def drawn(flags):
        return kinds.library("matplotlib")(flags) if flags.report.endswith(".png") else None

    what = "scores by class, and how classes are confused: .csv, or .png of the latter"
    endings = ".csv", ".png"
    file = kinds.free(kinds.text("FILE"), None, what, needs=[drawn], endings=endings)
    return {"predict_what": dict(report=file)}
