"""Memory and time of a GPT that does not fit in ddp: 2.4 billion parameters with AdamW, over 4
ranks that share a GPU.

    python -m benchmarks.large_gpt         (needs one GPU with 139 GiB, and takes about 4 minutes)

In ddp each rank would hold 39 GB of parameters, gradients and optimizer state, 155 GB in all. First
`drumline plan` says what each mode needs; then the real command trains in ddp, and runs out of
memory; then each sharded mode takes some steps, of which the memory and the time are measured.
Parameters are initialized block by block (meta_init), sent in bf16, and activations computed again.
NCCL takes each rank for a host of its own and sends over loopback sockets, so the times are those
of a slow network.

    python -m benchmarks.large_gpt --device cpu --layers 2 --width 96 --vocabulary 256 --context 32

checks that every part runs, without memory sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drumline.base.text import GIB
from drumline.config.schema import (
    Config,
    DistConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    WatchConfig,
)
from drumline.rank.collectives import all_sum, gather_json
from drumline.training.job.job import Job, build_job, make_manager
from drumline.training.steps.eager import TrainStep
from drumline.training.tasks.base import Loss, Task
from drumline.training.tasks.built_in import GPT, STD, NormalEmbedding, NormalLinear
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
TASK = f"{Path(__file__)}:LargeGpt"
SHARDS = 2
"""The ranks of one copy in hsdp."""
OWN_HOSTS = """
import os
if "RANK" in os.environ:
    os.environ["NCCL_HOSTID"] = "host-" + os.environ["RANK"]
"""
NETWORK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "4"}


class LargeGpt(Task):
    """A GPT on random tokens."""

    vocabulary: int = 50304
    defaults: ClassVar[dict[str, Any]] = {
        "optim.name": "adamw",
        "optim.lr": 1e-4,
        "optim.clip_norm": 1.0,
        "train.steps": 2,
        "train.precision": "bf16",
        "train.step": "eager",
        "model.activation_checkpointing": "full",
        "dist.meta_init": True,
        "log.display": "plain",
    }

    def model(self) -> nn.Module:
        model_settings = self.config.model
        size = {
            "context": model_settings.context,
            "layers": model_settings.layers,
            "heads": model_settings.heads,
            "width": model_settings.width,
        }
        model = GPT(
            vocab_size=self.vocabulary,
            **size,
            activation_checkpointing=model_settings.activation_checkpointing,
        )
        for module in model.modules():
            if isinstance(module, NormalLinear | NormalEmbedding):
                module.init_weights = partial(repeat_normal, module)  # type: ignore[method-assign]
        return model

    def train_data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(
            self.vocabulary, (256, self.config.model.context + 1), generator=generator
        )
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        scores = model(batch[0]).flatten(0, 1)
        return Loss(
            functional.cross_entropy(scores, batch[1].flatten(), reduction="sum")
            / batch[1].shape[1]
        )


def repeat_normal(module: nn.Linear | nn.Embedding) -> None:
    """Normal weights that repeat after a million: new ones for all would take most of the
    benchmark's time."""
    weights = module.weight.view(-1)
    drawn = torch.empty(1 << 20).normal_(std=STD)
    for part in weights.split(len(drawn)):
        part.copy_(drawn[: len(part)])


def config_of(options: argparse.Namespace, mode: str) -> Config:
    size = {
        "layers": options.layers,
        "width": options.width,
        "heads": options.heads,
        "context": options.context,
    }
    return Config(
        model=ModelConfig(**size, activation_checkpointing=True),
        train=TrainConfig(
            steps=100, batch_size_per_rank=options.micro_batch, precision="bf16", step="eager"
        ),
        optim=OptimConfig(name="adamw", lr=1e-4, clip_norm=1.0),
        dist=DistConfig(
            device=options.device,
            mode=mode,  # type: ignore[arg-type]
            shard_ranks=SHARDS if mode == "hsdp" else None,
            shard_dtype="bf16",
            meta_init=True,
        ),
        watch=WatchConfig(sidecar="off"),
    )


def measured(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """On a rank: some steps after the first one, which makes the optimizer's state."""
    os.environ |= {"NCCL_HOSTID": f"host-{os.environ['RANK']}", **NETWORK}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.procs))
    began = time.perf_counter()
    config = config_of(options, mode)
    task = LargeGpt(config)
    task.vocabulary = options.vocabulary
    ddp = make_manager(config)
    ddp.setup()
    try:
        job = build_job(config, task, ddp, step_kind="eager")
        ready_s = time.perf_counter() - began
        try:
            times, losses = take_steps(job, options)
        finally:
            job.close()
        measured: dict[str, Any] = {"seconds": times, "losses": losses, "ready_s": ready_s}
        measured["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if ddp.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(ddp.device)
            measured |= {
                "peak": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }
            measured["card"] = total - free
        return measured
    finally:
        ddp.cleanup()


def take_steps(job: Job, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Collective: the seconds of each measured step, and the loss of all. Fewer steps are measured
    where they take long."""
    take = TrainStep(job, clip_norm=1.0)
    times = list[float]()
    losses = list[float]()
    device = job.ddp.device
    most = options.steps + 1
    for number, step in enumerate(job.loader.steps()):
        if number == most:
            break
        begin = time.perf_counter()
        take(step)
        total, weight = all_sum(job.meter.take()).tolist()[:2]  # waits for the device
        times.append(time.perf_counter() - begin)
        losses.append(total / weight)
        if number == 0:
            slowest = max(gather_json(times[0]))
            most = 1 + max(1, min(options.steps, int(options.mode_s / slowest)))
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
    return times[1:], losses


def settings_of(options: argparse.Namespace) -> list[str]:
    """The model and the batch, for a command."""
    values = {
        "layers": options.layers,
        "heads": options.heads,
        "width": options.width,
        "context": options.context,
    }
    words = [word for name, value in values.items() for word in (f"--model.{name}", str(value))]
    words += ["--task.vocabulary", str(options.vocabulary), "--dist.device", options.device]
    return [*words, "--train.batch_size_per_rank", str(options.micro_batch)]


def plan(options: argparse.Namespace, memory_gib: float) -> dict[str, float]:
    """`drumline plan`: GiB of each mode."""
    ranks = [
        "--world",
        str(options.procs),
        "--ranks-per-node",
        str(SHARDS),
        "--gpu",
        f"{memory_gib:.1f}",
    ]
    words = [
        "plan",
        TASK,
        *ranks,
        *settings_of(options),
        "--dist.mode",
        "fsdp",
        "--dist.shard_dtype",
        "bf16",
    ]
    print(f"$ drumline plan large_gpt.py:LargeGpt {' '.join(words[2:])}", flush=True)
    done = drumline([*words, "--json"], Path.cwd(), limit_s=120)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    document = json.loads(done.stdout)
    totals = {plan["mode"]: plan["total"] / GIB for plan in document["ranks"]}
    parameters = document["num_parameters"]
    modes = document["gpus"][0]["modes"]
    sizes = ", ".join(f"{mode} {gib:.1f} GiB" for mode, gib in totals.items())
    print(
        f"{parameters / 1e9:.2f} billion parameters; planned for each of {options.procs} ranks: {sizes}"
    )
    print(
        f"the cheapest mode that fits in {memory_gib:.1f} GiB, a part of the card: {modes[str(options.procs)]}\n"
    )
    return totals


def drumline(
    words: Sequence[str], folder: Path, *, limit_s: float
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **NETWORK, "PYTHONPATH": path}
    command = [sys.executable, "-m", "drumline", *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )


def fail_in_ddp(options: argparse.Namespace, folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(OWN_HOSTS)
    words = [
        "train",
        TASK,
        "--procs",
        str(options.procs),
        "--run",
        str(folder / "ddp"),
        "--max-restarts",
        "0",
    ]
    words += settings_of(options)
    print(f"$ drumline train large_gpt.py:LargeGpt {' '.join(words[2:])}", flush=True)
    begin = time.perf_counter()
    done = drumline(words, folder, limit_s=150)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    start = next(
        (number for number, line in enumerate(lines) if "out of memory" in line), len(lines) - 4
    )
    print("\n".join(lines[max(0, start) :][:8]))
    print(f"exit code {done.returncode} after {time.perf_counter() - begin:.0f} s\n", flush=True)


def show_mode(options: argparse.Namespace, mode: str, planned: float) -> None:
    ranks = run_ranks(options.procs, measured, options, mode, timeout_s=150.0)
    first = ranks[0]
    seconds = max(statistics.median(rank["seconds"]) for rank in ranks)
    tokens = options.procs * options.micro_batch * options.context / seconds
    peak = max(rank.get("peak", 0) for rank in ranks) / GIB
    sizes = f"{planned:8.2f} {peak:9.2f} {planned / peak if peak else 0:7.2f}"
    host = max(rank["host"] for rank in ranks) / GIB
    print(
        f"{mode:<6} {sizes} {max(rank.get('reserved', 0) for rank in ranks) / GIB:9.2f} "
        f"{max(rank.get('card', 0) for rank in ranks) / GIB:7.1f} {host:6.1f} {seconds:9.2f} {tokens:9.0f} "
        f"{max(rank['ready_s'] for rank in ranks):7.1f}   {' '.join(f'{loss:.4f}' for loss in first['losses'])}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu [cuda]")
    parser.add_argument("--procs", type=int, default=4, help="ranks [4]")
    parser.add_argument("--layers", type=int, default=20, help="[20]")
    parser.add_argument("--width", type=int, default=3072, help="[3072]")
    parser.add_argument("--heads", type=int, default=24, help="[24]")
    parser.add_argument("--context", type=int, default=1024, help="[1024]")
    parser.add_argument(
        "--vocabulary", type=int, default=LargeGpt.vocabulary, help=f"[{LargeGpt.vocabulary}]"
    )
    parser.add_argument("--micro-batch", type=int, default=4, help="samples of a rank [4]")
    parser.add_argument(
        "--steps", type=int, default=3, help="measured steps of each mode, at most [3]"
    )
    parser.add_argument(
        "--mode-s", type=float, default=25.0, help="seconds for the measured steps of a mode [25]"
    )
    parser.add_argument(
        "--modes", default="ddp,fsdp,zero1,hsdp", help="in this order [ddp,fsdp,zero1,hsdp]"
    )
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    memory = torch.cuda.get_device_properties(0).total_memory / GIB if is_gpu else 139.0
    began = time.perf_counter()
    modes = options.modes.split(",")
    name = torch.cuda.get_device_name(0) if is_gpu else "cpu"
    print(f"{name}, {memory:.1f} GiB, torch {torch.__version__}, {options.procs} ranks on it")
    planned = plan(options, memory / options.procs)
    if "ddp" in modes:
        with tempfile.TemporaryDirectory() as scratch:
            fail_in_ddp(options, Path(scratch))
    print(
        "GiB of a rank; of all processes on the card; of a rank in the host's memory; from its start to the first step"
    )
    print(
        "mode    planned  measured   ratio  reserved    card   host  s a step  tokens/s   start   losses"
    )
    for mode in modes:
        if mode != "ddp":
            show_mode(options, mode, planned[mode])
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
