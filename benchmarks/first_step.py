"""How long after the command the first step of a job ends: `drumline train` against a plain script
under torchrun, and against another checkout, turn by turn.

    python -m benchmarks.first_step --against ../before --rounds 7

Two ranks, a MiniResNet, images of the size of the bundled digits. The plain script has what such
scripts have: a process group, DistributedDataParallel, a sampler and a loader. It reads no data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parents[1]
RANKS = 2
PLAIN = """
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images):
        hidden = torch.relu(self.norm(self.first(images)))
        return torch.relu(self.second_norm(self.second(hidden)) + self.shortcut(images))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(
    Block(1, 16, 1), Block(16, 32, 2), Block(32, 64, 2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
dataset = TensorDataset(torch.randn(1500, 1, 8, 8), torch.randint(0, 10, (1500,)))
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
for images, labels in loader:
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            file.write(str(time.time()))
    break
dist.destroy_process_group()
"""


def plain(folder: Path) -> float:
    """Seconds, of the script under torchrun."""
    script = folder / "plain.py"
    script.write_text(PLAIN)
    end = folder / "end"
    began = time.time()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={RANKS}", str(script), str(end)]
    subprocess.run(command, check=True, capture_output=True)
    return float(end.read_text()) - began


def of_drumline(checkout: Path, folder: Path) -> float:
    run = folder / "run"
    words = f"train digits --procs {RANKS} --train.steps 2 --train.eval_every_epochs 0 --fresh --run {run}"
    began = time.time()
    subprocess.run(
        [sys.executable, "-m", "drumline", *words.split()],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    events = (run / "events" / "rank-00000.jsonl").read_text().splitlines()
    ends = [event["time"] for event in map(json.loads, events) if event["kind"] == "first_step"]
    return float(ends[0]) - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout, measured as well")
    parser.add_argument("--rounds", type=int, default=7, help="[%(default)s]")
    options = parser.parse_args()
    checkouts = [HERE] if options.against is None else [HERE, options.against]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain_s: list[float] = []
        ours_s: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
        for turn in range(options.rounds + 1):
            plain_taken_s = plain(folder)
            taken_s = {checkout: of_drumline(checkout, folder) for checkout in checkouts}
            if turn:  # the first fills caches
                plain_s.append(plain_taken_s)
                for checkout, seconds in taken_s.items():
                    ours_s[checkout].append(seconds)

    print(f"plain script under torchrun: {statistics.median(plain_s):.2f} s")
    for checkout, title in zip(checkouts, ("drumline train", "before"), strict=False):
        seconds_of_turns = ours_s[checkout]
        ratios = sorted(ours / plain for ours, plain in zip(seconds_of_turns, plain_s, strict=True))
        print(
            f"{title}: {statistics.median(seconds_of_turns):.2f} s, ratio to the plain script "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} rounds)"
        )


if __name__ == "__main__":
    main()
