"""Scores by class: --report FILE.csv, precision, recall, F1, counts and the confusion matrix.

python train.py --resume run.pt --report classes.csv
"""

import csv
import io

from disk.files import SPLITS, plural, write_whole
from tasks.metrics import predictions


def rows_of(outputs, y, names):
    """Yield a row for each class, a dict, of logits [n, C] for y, see `score` of tasks/metrics.py; `as NAME`: nodes of the class, or
    with the label, that are predicted to be of another."""
    predicted = predictions(outputs, y)
    C = len(names)
    if y.dim() == 1:
        counts = (y * C + predicted)[y >= 0].bincount(minlength=C * C).view(C, C)
        columns = counts.diag(), counts.sum(1), counts.sum(0)
    else:
        predicted &= y >= 0
        counts = ((y > 0).double().T @ predicted.double()).long()
        columns = counts.diag(), (y > 0).sum(0), predicted.sum(0)
    for name, confused, hits, n, m in zip(names, counts, *(of.tolist() for of in columns)):
        row = {"class": name, "precision": hits / max(m, 1), "recall": hits / max(n, 1)}
        row |= {"f1": 2 * hits / max(n + m, 1), "count": n, "predicted": m}
        yield row | {f"as {other}": count for other, count in zip(names, confused.tolist())}


def write(store, path, outputs):
    """Write --report of logits [V, C] of all nodes of a store."""
    C = outputs.shape[1]
    names = store.class_names or []
    names = [*names, *range(len(names), C)][:C]
    rows = []
    for part in SPLITS[::-1]:
        ids = store.split[part]
        of_part = rows_of(outputs[ids], store.labels[ids], names) if len(ids) else ()
        rows += [{"part": part, **row} for row in of_part]
    text = io.StringIO()
    columns = [*rows[0]] if rows else ["part"]
    table = csv.DictWriter(text, columns)
    table.writeheader()
    table.writerows(rows)
    write_whole(path, lambda file: file.write(text.getvalue().encode()))
    print(f"wrote {path}: {plural(len(rows), 'row')} of {', '.join(columns[:7])}, ...")


def flags(kinds):
    """Declare the flag of the report."""
    what = "precision, recall, F1 by class, and how classes are confused"
    file = kinds.free(kinds.text("FILE.csv"), None, what, endings=(".csv",))
    return {"predict_what": dict(report=file)}
