"""The trained network for other programs: its weights as safetensors, flags and sizes of the data as JSON.

    python train.py --dataset cora --export cora_model     # cora_model/model.safetensors, cora_model/config.json

docs/models.md has the lines that load it.
"""

import json
from pathlib import Path

import torch

from disk.files import StoreError, write_whole

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export(folder, network, config):
    """Write a network into a folder, which is made if it is missing, and print what is in it. config: `described_run`."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"--export {folder} could not be made: {error.strerror}") from error
    verb = "replaced" if (folder / WEIGHTS).exists() else "wrote"
    weights = {name: t.detach().cpu().contiguous() for name, t in network.state_dict().items()}
    write_safetensors(folder / WEIGHTS, weights)
    text = json.dumps(config, indent=1).encode()
    write_whole(folder / CONFIG, lambda file: file.write(text))
    count = sum(t.numel() for t in weights.values())
    print(f"{verb} {folder}: {count:,} weights in {WEIGHTS}, flags and widths in {CONFIG}")


def write_safetensors(path, tensors):
    """Write {name: tensor}, all contiguous and in host memory, as a safetensors file: the length of a header in 8 bytes, the
    header in JSON, the tensors (https://huggingface.co/docs/safetensors)."""
    # the widest first: then each starts at a multiple of its numbers' size
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    header = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, t in tensors.items():
        end = start + t.nbytes
        place = {"dtype": DTYPES[t.dtype], "shape": [*t.shape], "data_offsets": [start, end]}
        header[name] = place
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def write(file):
        file.write(len(text).to_bytes(8, "little") + text)
        for t in tensors.values():
            file.write(t.reshape(-1).view(torch.uint8).numpy())

    write_whole(path, write)
