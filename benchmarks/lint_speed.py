"""How long the linter takes for a thousand files of training code, and to start, on one core.

    make bench-lint        (or: python -m benchmarks.lint_speed --files 200 --parts)

The files are generated: about 250 lines each, in projects of ten that import from one another:
layers, data, three training loops with their saves, and a script that starts it all; right and
wrong in places. The goals are below 10 s for 1,000 files, and below 0.2 s to start, in CPU seconds.
`--folder` measures a large checkout, too: for the 1,500 files of Megatron-LM, the goals are below
15 s and 500 MB. `--parts` shows the time of each rule, of that checkout if there is one.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GOAL_S = 10.0
GOAL_START_S = 0.2
PROJECT = 10
LAYERS = '''
class Block{number}(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(inputs)))
        if self.training:
            hidden = self.dropout(hidden)
        return inputs + self.second(hidden)

'''
DATA = '''
class Samples{number}(Dataset):
    """Pairs from a folder of files."""

    def __init__(self, folder: str, limit: int | None = None) -> None:
        self.names = sorted(os.listdir(folder))[:limit]
        self.folder = folder

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int):
        pair = torch.load(os.path.join(self.folder, self.names[index]), map_location="cpu")
        return pair["input"], pair["target"]


def loader_{number}(folder: str, batch_size: int, rank: int, world_size: int) -> DataLoader:
    data = Samples{number}(folder)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)

'''
TRAINING = """
def train_epoch_{number}(model, loader, optimizer, scaler, scheduler, epoch: int, args) -> float:
    model.train()
    loader.sampler.set_epoch(epoch)
    total = torch.zeros(1, device=args.device)
    for step, (inputs, targets) in enumerate(loader):
        inputs = inputs.to(args.device, non_blocking=True)
        targets = targets.to(args.device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(inputs), targets) / args.accumulate
        scaler.scale(loss).backward()
        if (step + 1) % args.accumulate == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
        total += loss.detach()
        if step % args.log_every == 0 and args.rank == 0:
            print(f"epoch {{epoch}} step {{step}} loss {{loss.item():.4f}}")
    dist.all_reduce(total)
    return (total / len(loader) / dist.get_world_size()).item()


def save_{number}(model, optimizer, scaler, epoch: int, args) -> None:
    if args.rank == 0:
        state = {{"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}}
        state["scaler"] = scaler.state_dict()
        torch.save(state, args.path)
    dist.barrier()

"""
STARTING = """
def main_{number}() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--data", default="data")
    parser.add_argument("--path", default="model.pt")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--log-every", type=int, default=50)
    args = parser.parse_args()
    args.local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(args.local_rank)
    args.device = torch.device("cuda", args.local_rank)
    dist.init_process_group("nccl")
    args.rank = dist.get_rank()
    torch.manual_seed(1 + args.rank)
    model = Block0(64).to(args.device)
    model = DDP(model, device_ids=[args.local_rank], find_unused_parameters={unused})
    loader = loader_0(args.data, args.batch_size, args.rank, dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(args.epochs):
        loss = train_epoch_0(model, loader, optimizer, scaler, scheduler, epoch, args)
        save_0(model, optimizer, scaler, epoch, args)
    torch.save(model.state_dict(), "last.pt")
    dist.destroy_process_group()

"""
IMPORTS = """\
from __future__ import annotations

import argparse
import os

import torch
from torch import nn

"""
RANKS = """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

"""
KINDS = (LAYERS, LAYERS, LAYERS, DATA, DATA, TRAINING, TRAINING, TRAINING, LAYERS)
LINES = 250


def generate(folder: Path, count: int) -> int:
    """Projects of ten files; how many lines there are in all."""
    lines = 0
    for number in range(count):
        project = folder / f"project{number // PROJECT:03}"
        project.mkdir(exist_ok=True)
        text = "".join(
            _script() if number % PROJECT == PROJECT - 1 else _module(KINDS[number % PROJECT])
        )
        (project / f"part{number % PROJECT}.py").write_text(text)
        lines += text.count("\n")
    return lines


def _module(kind: str) -> Iterator[str]:
    """What it is for, once if that is a training loop; layers and data make up the rest."""
    yield IMPORTS
    yield "" if kind is LAYERS else RANKS
    left = LINES - IMPORTS.count("\n")
    blocks = chain([kind], cycle((LAYERS, DATA) if kind is TRAINING else (kind,)))
    for number, block in enumerate(blocks):
        if left <= 0:
            return
        yield (
            block.format(number=number) if "{{" in block else block.replace("{number}", str(number))
        )
        left -= block.count("\n")


def _script() -> Iterator[str]:
    yield IMPORTS + RANKS
    yield "from part0 import Block0\nfrom part3 import loader_0\nfrom part5 import save_0, train_epoch_0\n\n"
    yield STARTING.format(number=0, unused=True)
    yield 'if __name__ == "__main__":\n    main_0()\n'


@dataclass(frozen=True)
class Usage:
    """What one run of the command takes."""

    cpu_s: float
    wall_s: float
    peak_mb: int
    """Of the largest process."""


def usage_of(folder: Path, *flags: str) -> Usage:
    command = [sys.executable, "-m", "drumline", "lint", str(folder)]
    command += ["--statistics", "--exit-zero", "--no-config", *flags]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Usage(used.ru_utime + used.ru_stime, wall_s, used.ru_maxrss // 1024)


def least(folder: Path, rounds: int, *flags: str) -> Usage:
    """Of several runs, the one with the least CPU time."""
    return min((usage_of(folder, *flags) for _ in range(rounds)), key=lambda usage: usage.cpu_s)


def print_figures(folder: Path, rounds: int) -> None:
    """A run of all rules, and one on the same files after it."""
    whole = least(folder, rounds, "--no-cache")
    with tempfile.TemporaryDirectory() as cache:
        usage_of(folder, "--cache-dir", cache)
        again = least(folder, rounds, "--cache-dir", cache)
    for name, usage in (("all rules:", whole), ("again:", again)):
        print(
            f"  {name:10} {usage.cpu_s:6.2f} CPU s, {usage.wall_s:6.2f} s, at most {usage.peak_mb:,} MB"
        )


def parts_of(folder: Path) -> dict[str, float]:
    """Seconds of reading, of understanding, and of each rule."""
    from drumline_lint.linter import all_docs, check, read_all
    from drumline_lint.reading.discovery import find_files
    from drumline_lint.rules import all_rules
    from drumline_lint.settings import Settings

    spent: defaultdict[str, float] = defaultdict(float)
    begin = time.process_time()
    readings = read_all(find_files([folder]).files)
    spent["finding and parsing"] = time.process_time() - begin
    rules = all_rules()
    timed = {number: _timed(module, spent) for number, module in rules.items()}
    begin = time.process_time()
    check(readings, timed, Settings(chosen=frozenset(all_docs(rules))))
    whole = time.process_time() - begin
    spent["names, and the rest"] = whole - sum(spent[number] for number in rules)
    return dict(sorted(spent.items(), key=lambda part: -part[1]))


def _timed(module: Any, spent: defaultdict[str, float]) -> Any:
    def around(look: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> list[Any]:
            begin = time.process_time()
            findings = list(look(*arguments))
            spent[module.RULE.id] += time.process_time() - begin
            return findings

        return timed

    looks = {
        name: around(getattr(module, name))
        for name in ("check", "check_shell")
        if hasattr(module, name)
    }
    return SimpleNamespace(RULE=module.RULE, **looks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="a checkout to measure, too")
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        empty = folder / "empty"
        empty.mkdir()
        (empty / "nothing.py").touch()
        lines = generate(folder, options.files)
        start = least(empty, 5 * options.rounds, "--no-cache")
        print(f"start: {start.cpu_s:.3f} CPU s  (goal {GOAL_START_S:g})")
        goal = f"  (goal {GOAL_S:g})" if options.files == 1000 else ""
        print(f"{options.files:,} generated files, {lines:,} lines{goal}")
        print_figures(folder, options.rounds)
    if options.folder is not None:
        print(f"{options.folder}")
        print_figures(options.folder, options.rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder, options.files)
        if options.parts:
            gc.disable()  # as the command does
            for part, seconds in parts_of(options.folder or folder).items():
                print(f"  {seconds:6.2f} s  {part}")


if __name__ == "__main__":
    main()
