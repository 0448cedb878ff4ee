"""A plain DDP script: text, with all weights in a log file after every step."""

import json
import tempfile
import time
from typing import Any

import torch
from parts import PLANTED, STEPS, LineNet, batches, finish, line_loss, lines, start
from torch.nn.parallel import DistributedDataParallel


def write_log(file: Any, step: int, model: torch.nn.Module) -> None:
    weights = {name: weight.tolist() for name, weight in model.named_parameters()}  # planted
    file.write(json.dumps({"step": step, "weights": weights}) + "\n")  # planted
    file.flush()  # planted


def main() -> None:
    device = start()
    model = DistributedDataParallel(LineNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tempfile.TemporaryFile("w") as file:
        begin = time.perf_counter()
        for step, (tokens,) in zip(range(STEPS), batches(lines(4096)), strict=False):
            loss = line_loss(model, tokens.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if PLANTED:
                write_log(file, step, model)  # planted
        finish(STEPS, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
