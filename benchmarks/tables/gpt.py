"""A model that fills the card: GPT-2 124M on random tokens from an array in memory, compiled by
everyone.

Ours is a whole run with everything on: watch, ledger, events, and a checkpoint in every block, in
the background.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import Taken, Way, measure
from benchmarks.options import Options
from benchmarks.report import Goal, Row, Table, described, peer_versions, ratio
from benchmarks.ways.by_hand import by_hand
from benchmarks.ways.ours import run_folder, steps_of, whole_run
from benchmarks.ways.peers import peers
from benchmarks.work import Batch, Work
from drumline.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from drumline.runs.events import read_events
from drumline.runs.run_folder import RunFolder
from drumline.training.manager import RunManager
from drumline.training.tasks import load_task

GPT2 = ModelConfig(name="gpt", layers=12, heads=12, width=768, context=1024)
TINY = ModelConfig(name="gpt", layers=1, heads=2, width=16, context=16)
VOCABULARY = 50304
TINY_VOCABULARY = 64
GOAL_TOKENS = 515_000
GOAL_BY_HAND = 0.98
PEAK = 989e12
# As often as a block is long, so that each has one.
SAVE_EVERY = 25
TINY_SAVE_EVERY = 2
BY_HAND = "by hand, compiled"


class Windows:
    """Batches without end, each of windows at random places; pinned, so that the copy does not stop
    the step."""

    def __init__(
        self, tokens: NDArray[np.uint16], *, size: int, context: int, pinned: bool
    ) -> None:
        self._tokens = tokens
        self._size = size
        self._context = context
        self._pinned = pinned

    def __iter__(self) -> Iterator[Batch]:
        random = np.random.default_rng(0)
        offsets = np.arange(self._context + 1)
        while True:
            starts = random.integers(0, len(self._tokens) - self._context - 1, self._size)
            rows = torch.from_numpy(self._tokens[starts[:, np.newaxis] + offsets].astype(np.int64))
            inputs = rows[:, :-1].contiguous()
            targets = rows[:, 1:].contiguous()
            yield (inputs.pin_memory(), targets.pin_memory()) if self._pinned else (inputs, targets)


def make(options: Options, ddp: RunManager) -> Table:
    folder = options.folder
    size = 4 if options.tiny else options.micro_batch
    config = gpt_config(folder, size=size, is_cuda=ddp.device.type == "cuda", tiny=options.tiny)
    tokens = write_tokens(
        folder, windows=256 if options.tiny else 8192, config=config, tiny=options.tiny
    )
    vocabulary = TINY_VOCABULARY if options.tiny else VOCABULARY
    context = config.model.context
    supply = Windows(tokens, size=size, context=context, pinned=ddp.device.type == "cuda")
    work = Work(config, {"vocab_size": vocabulary}, ddp.device, lambda: supply, not options.tiny)
    kinds = ("compile", "compiled_graph") if ddp.device.type == "cuda" else ("eager",)
    samples = len(tokens) // (context + 1)
    ways = [
        Way(BY_HAND, partial(by_hand, work)),
        *peers(work, suffix=", compiled"),
        *(_ours(ddp, steps_of(config, kind), folder, samples) for kind in kinds),
    ]
    chosen = [way for way in ways if options.wants(way.name)]
    rounds = options.rounds_or(7)
    steps = config.checkpoint.every_steps
    warm_up = steps + steps // 2  # the save then falls into the midst of each block
    taken = measure(chosen, rounds=rounds, steps=steps, warm_up=warm_up)
    parameters = sum(parameter.numel() for parameter in work.module().parameters())
    how = f"n = {rounds} blocks of {steps} steps, in turn in one process under DDP; medians"
    return _table(taken, config, parameters, how, saves=_saves(taken, folder, after=warm_up))


def gpt_config(folder: Path, *, size: int, is_cuda: bool, tiny: bool) -> Config:
    return Config(
        model=TINY if tiny else GPT2,
        data=DataConfig(name="tokens", dir=str(folder)),
        optim=OptimConfig(
            name="adamw", lr=6e-4, weight_decay=0.1, clip_norm=1.0, schedule="constant"
        ),
        train=TrainConfig(batch_size=size, precision="bf16" if is_cuda else "fp32"),
        checkpoint=CheckpointConfig(
            every_steps=TINY_SAVE_EVERY if tiny else SAVE_EVERY, keep_last=1, keep_best=0
        ),
    )


def write_tokens(folder: Path, *, windows: int, config: Config, tiny: bool) -> NDArray[np.uint16]:
    """Random ones, in the files that `--data.name tokens` reads."""
    vocabulary = TINY_VOCABULARY if tiny else VOCABULARY
    length = windows * (config.model.context + 1)
    tokens = np.random.default_rng(0).integers(0, vocabulary, length, dtype=np.uint16)
    for name, part in (("train", tokens), ("eval", tokens[: 4 * (config.model.context + 1)])):
        np.save(folder / f"{name}.npy", part)
    (folder / "meta.json").write_text(json.dumps({"vocab_size": vocabulary}))
    return tokens


def _ours(ddp: RunManager, config: Config, folder: Path, samples: int) -> Way:
    name = f"ours, {str(config.train.step).replace('_', ' ')}, everything on"
    return whole_run(name, ddp, config, load_task("text"), folder, samples=samples)


def flops_per_token(model: ModelConfig, parameters: int) -> int:
    """6 for each parameter, and 12 x layers x width x context for attention (heads x size of a head
    is the width)."""
    return 6 * parameters + 12 * model.layers * model.width * model.context


def _saves(taken: list[Taken], folder: Path, *, after: int) -> list[str]:
    """What the runs say themselves of those in the blocks that were timed."""
    lines = []
    for way in taken:
        log = RunFolder(run_folder(folder, way.name)).event_file(0)
        events = read_events(log) if log.exists() else []
        stopped = [
            e["blocked_s"] * 1e3 for e in events if e["kind"] == "checkpoint" and e["step"] > after
        ]
        if stopped:
            lines.append(
                f"{way.name}: {len(stopped)} saves in {len(way.seconds)} blocks; by the run's own events each stopped "
                f"it for {described(stopped).strip()} ms"
            )
    return lines


def _table(
    taken: list[Taken], config: Config, parameters: int, how: str, *, saves: list[str]
) -> Table:
    model = config.model
    rows = [
        Row(way.name, [samples * model.context for samples in way.per_second()], way.failure)
        for way in taken
    ]
    title = f"gpt: {parameters / 1e6:.0f}M parameters, context {model.context}, micro-batch {config.train.batch_size}"
    table = Table("gpt", title, "tokens/s", rows, how)
    our_rows = [row for row in rows if row.way.startswith("ours") and row.values]
    best = max(our_rows, key=lambda row: row.median) if our_rows else None
    goals = [
        Goal("ours, the best, tokens/s", best.median if best else None, at_least=GOAL_TOKENS),
        Goal("ours / by hand", ratio(best, table.row(BY_HAND)), at_least=GOAL_BY_HAND),
    ]
    notes = [*saves, _shares(rows, model, parameters), *peer_versions()]
    return replace(table, goals=goals, notes=notes)


def _shares(rows: list[Row], model: ModelConfig, parameters: int) -> str:
    each = flops_per_token(model, parameters)
    measured: list[Any] = [row for row in rows if row.values]
    shares = ", ".join(f"{row.way} {row.median * each / PEAK:.1%}" for row in measured)
    return f"share of 989 TFLOP/s at {each / 1e6:.0f} MFLOP a token (6 N + 12 L W T): {shares}"
