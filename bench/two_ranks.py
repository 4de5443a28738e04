"""Two ranks of train.py on one GPU: python -m bench.two_ranks FLAGS OF TRAIN.PY, for `python -m bench gpu --parts ranks`.

NCCL refuses two ranks on a GPU, so gloo carries gradients through host memory. Importing this module changes ddp.py:
spawned ranks import it for `worker`, before they join.
"""

import sys
from unittest import mock

import torch
import torch.distributed as dist

import ddp
import train

RANKS = 2
init_process_group = dist.init_process_group


def with_gloo(backend, device_id=None, **options):
    """init_process_group with gloo for both kinds of device."""
    return init_process_group("cpu:gloo,cuda:gloo", **options)


dist.init_process_group = with_gloo
ddp.Ranks.device = property(lambda ranks: torch.device("cuda", 0))


def worker(ranks, args, path):
    """train.py's own worker."""
    return train.worker(ranks, args, path)


if __name__ == "__main__":
    with mock.patch.object(torch.cuda, "device_count", lambda: RANKS):
        args = train.parse_args([*sys.argv[1:], "--gpus", str(RANKS)])
        ddp.launch(worker, RANKS, args, train.prepare(args), gpus=RANKS)
