"""The same with a loop of its own, over DDPManager (level 1): one rank leaves the loop too early.

    script.py FOLDER STEPS EVERY HANG_S

Saves every EVERY steps, goes on from what it saved, and writes down when each step was done.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from drumline import DDPManager
from drumline.config.schema import WatchConfig
from drumline.data.sharding import Cursor
from tests.multinode.faults.inject import Injection
from tests.multinode.faults.points import Points, make_model

BATCH = 16


def save(path: Path, model: torch.nn.Module, step: int, loader: Any) -> None:
    state = {
        "model": model.state_dict(),
        "step": step,
        "cursor": (loader.cursor.epoch, loader.cursor.position),
    }
    torch.save(state, path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)


def main(folder: Path, steps: int, every: int, hang_s: float) -> None:
    injection = Injection(os.environ, rank=int(os.environ["RANK"]))
    saved = folder / "saved.pt"
    watch = WatchConfig(hang_s=hang_s)
    with DDPManager(device="cpu", threads=1, watch=watch, run=folder / "run") as ddp:
        loader = ddp.loader(Points(None), batch_size=BATCH)
        model = ddp.wrap(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = 0
        if saved.exists():
            state = torch.load(saved)
            model.load_state_dict(state["model"])
            step = state["step"]
            loader.cursor = Cursor(*state["cursor"])
        # DDP lays its buckets out anew after the first backward pass, which changes the last bit of
        # what comes after.
        model(torch.zeros(4, 8)).sum().mul(0.0).backward()
        optimizer.zero_grad()
        while step < steps and not injection.leaves_now(step + 1):
            for inputs, targets in loader:
                if step == steps or injection.leaves_now(step + 1):
                    break
                injection.begin_step(step + 1)
                loss = functional.cross_entropy(model(inputs), targets) * loader.scale
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if ddp.is_main_process():
                    with (folder / "steps").open("a") as file:
                        file.write(f"{time.time()} {step} {os.getpid()}\n")
                    if step % every == 0:
                        save(saved, model, step, loader)
        if injection.plan.fault == "left_waiting":
            ddp.barrier()
        if ddp.is_main_process() and step == steps:
            save(folder / "final.pt", model, step, loader)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
