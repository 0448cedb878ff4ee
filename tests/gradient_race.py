"""Shows why no other thread may read a `.grad`: one that does ends the process by SIGSEGV, or mixes
up gradients.

    python3 -m tests.gradient_race --seconds 60

A backward pass replaces `parameter.grad` without the GIL. A thread that reads it meanwhile, with
the GIL, may take a reference to a gradient that is being freed. From then on two tensors have the
same memory: the process ends in `zero_grad` (SIGSEGV, `free(): corrupted unsorted chunks`), or an
optimizer step gets the gradient of another parameter (`Attempting to broadcast a dimension of
length ...`). `--reads version` reads the version counter of the parameter instead, which is safe.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
import time

import torch
from torch import nn


def read_for_ever(parameter: nn.Parameter, attribute: str) -> None:
    while True:
        for _ in range(50):
            getattr(parameter, attribute)
        time.sleep(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--reads", choices=("grad", "version"), default="grad")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 5))
    attribute = "grad" if options.reads == "grad" else "_version"
    threading.Thread(target=read_for_ever, args=(model[0].weight, attribute), daemon=True).start()
    end = time.monotonic() + options.seconds
    num_passes = 0
    while time.monotonic() < end:
        model(torch.randn(8, 7)).sum().backward()
        model.zero_grad(set_to_none=True)
        num_passes += 1
    print(f"torch {torch.__version__}: {num_passes} backward passes, no crash")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
