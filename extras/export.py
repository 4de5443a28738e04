"""The trained network for other programs: its weights as safetensors, flags and sizes of the data as JSON.

    python train.py --dataset cora --export cora_model     # cora_model/model.safetensors, cora_model/config.json

It takes `pip install safetensors`; docs/models.md has the lines that load it.
"""

import json
import os
from pathlib import Path

from disk.files import write_whole

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def export(folder, network, config):
    """Write a network into a folder, which is made if it is missing, and print what is in it. config: `described_run`."""
    from safetensors.torch import save

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    verb = "replaced" if (folder / WEIGHTS).exists() else "wrote"
    # copies: the library refuses names that share memory, as those of tied weights do
    weights = {name: t.cpu().contiguous().clone() for name, t in network.state_dict().items()}
    contents = {
        WEIGHTS: save(weights, {"format": "pt"}),
        CONFIG: json.dumps(config, indent=1).encode(),
    }
    for name, content in contents.items():
        write_whole(folder / name, lambda file, content=content: file.write(content))
    count = sum(t.numel() for t in weights.values())
    print(f"{verb} {folder}: {count:,} weights in {WEIGHTS}, flags and widths in {CONFIG}")


def flags(kinds):
    """Declare the flag of exports."""
    return {
        "predict_what": dict(
            export=kinds.free(
                kinds.text("DIR"),
                None,
                "write the trained network as model.safetensors and config.json",
                needs=[kinds.one_run, folder_to_write, kinds.library("safetensors")],
            )
        )
    }


def folder_to_write(flags):
    """Refuse a folder that cannot be made or written to, and a store."""
    path = os.path.abspath(flags.export)
    if os.path.exists(os.path.join(path, "meta.json")):
        return "is a store: give a folder of its own"
    while not os.path.isdir(path):
        if os.path.lexists(path):
            return f"cannot be made: {path} is no folder"
        path = os.path.dirname(path)
    if not os.access(path, os.W_OK):
        return f"cannot be written in {path}"
