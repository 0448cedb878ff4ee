"""`drumline plan TASK`: the command line of the memory plan (training/memory/memory_plan.py), and
its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from drumline.base.errors import ExitCode
from drumline.base.startup import interruptible, loading
from drumline.base.text import memory_size, plural, show_lines
from drumline.cli.command_line import HELP_FLAG, read_command, show_json
from drumline.cli.train_command import CONFIG_FLAG, settle_before_torch
from drumline.config import FlagTable, switch
from drumline.config.schema import Count
from drumline.training.memory.gpu_table import GPUS, gpu_memory

if TYPE_CHECKING:
    from drumline.training.memory.memory_plan import MemoryPlan

WORLDS = (1, 2, 4, 8)
USUAL_GPUS = ("l4", "a100-40gb", "l40s", "h100", "h200", "b200")
RANKS_PER_NODE = 8
OWN_FLAGS: FlagTable = {
    "world": (tuple[Count, ...], "N[,N...]", f"Numbers of ranks [{','.join(map(str, WORLDS))}]."),
    "gpu": (
        tuple[str, ...],
        "NAME[,NAME...]",
        f"GPUs, or GiB of memory [{','.join(USUAL_GPUS)}]; known: {', '.join(GPUS)}.",
    ),
    "ranks-per-node": (
        Count,
        "N",
        f"For hsdp, which shards the model inside a node [{RANKS_PER_NODE}].",
    ),
    **CONFIG_FLAG,
    "json": switch("Print one JSON object, for scripts: sizes are in bytes."),
    **HELP_FLAG,
}
USAGE = """\
usage: drumline plan TASK [--world 1,2,4,8] [--gpu h100,a100-40gb] [--section.name value ...]

Prints how much memory a rank of TASK needs on a GPU at the peak of a step, by mode (ddp, zero1, fsdp, hsdp) and number
of ranks, and the cheapest mode that fits on each GPU. A step is taken with tensors that have sizes but no data: no GPU
is needed, and hardly any memory. The settings are those of `drumline train TASK`. Nothing is saved.
"""
PARTS = ("parameters", "gradients", "optimizer", "activations", "communication", "total")


def run(argv: Sequence[str]) -> int:
    """Plan on one step without data, and print the table."""
    flags = read_command("plan", argv, {"": OWN_FLAGS}, USAGE, takes_settings=True)
    task, layers = settle_before_torch(flags)
    gpus = gpu_memory(flags.values.get("gpu", USUAL_GPUS))
    with interruptible("interrupted"), loading():
        from drumline.training.memory.memory_plan import plan_memory
        from drumline.training.tasks.built_in import load_task, resolve_task

    task_class = load_task(task)
    config = resolve_task(task, task_class, layers)
    worlds = flags.values.get("world", WORLDS)
    per_node = flags.values.get("ranks-per-node", RANKS_PER_NODE)
    plan = plan_memory(config, task_class(config), worlds=worlds, ranks_per_node=per_node)
    if flags.values.json:
        show_json(as_document(plan, gpus))
    else:
        show_lines([*plan_table(plan), *recompute_lines(plan), "", *gpu_rows(plan, gpus)])
    return ExitCode.SUCCESS


def as_document(plan: MemoryPlan, gpus: Mapping[str, int]) -> dict[str, object]:
    """The plan as JSON: `ranks` has every mode and number of ranks, `gpus` the cheapest mode by
    number of ranks."""
    chosen = [
        {"name": name, "memory": memory, "modes": cheapest_modes(plan, memory)}
        for name, memory in gpus.items()
    ]
    return {
        "num_parameters": plan.num_parameters,
        "ranks": [{**asdict(rank), "total": rank.total} for rank in plan.ranks],
        "gpus": chosen,
        "impossible": dict(plan.impossible),
        "recompute": plan.recompute,
    }


def cheapest_modes(plan: MemoryPlan, memory: int) -> dict[int, str | None]:
    """By number of ranks; None: no mode fits."""
    modes: dict[int, str | None] = {}
    for rank in plan.ranks:
        cheapest = plan.cheapest(rank.world_size, memory)
        modes[rank.world_size] = None if cheapest is None else cheapest.mode
    return modes


def plan_table(plan: MemoryPlan) -> Iterator[str]:
    """A row for each number of ranks and mode."""
    yield f"memory of a rank at the peak of a step, {plan.num_parameters:,} parameters"
    yield f"ranks  micro-batch  mode   {'  '.join(f'{part:>13}' for part in PARTS)}"
    for rank in plan.ranks:
        sizes = "  ".join(f"{memory_size(getattr(rank, part)):>13}" for part in PARTS)
        yield f"{rank.world_size:>5}  {rank.micro_batch_size:>11}  {rank.mode:<5}  {sizes}"
    for world_size, reason in plan.impossible.items():
        yield f"{world_size:>5}  {reason}"


def recompute_lines(plan: MemoryPlan) -> Iterator[str]:
    """What activation checkpointing saves."""
    recompute = plan.recompute
    if recompute is None:
        return

    where = plural(recompute.world_size, "rank")
    yield (
        f"recompute: {recompute.blocks}: {memory_size(recompute.total)} on {where}, "
        f"{memory_size(recompute.total_without)} without"
    )
    if recompute.saves_little:
        yield (
            f"warning: --model.activation_checkpointing saves {max(0.0, recompute.saving):.0%} of the activations; "
            "name the classes of larger blocks with --dist.wrap, or leave it off"
        )


def gpu_rows(plan: MemoryPlan, gpus: Mapping[str, int]) -> Iterator[str]:
    """The cheapest mode for each GPU and number of ranks."""
    worlds = dict.fromkeys(rank.world_size for rank in plan.ranks)
    yield _row("cheapest mode that fits", [plural(world_size, "rank") for world_size in worlds])
    for name, memory in gpus.items():
        modes = cheapest_modes(plan, memory).values()
        yield _row(f"{name} ({memory_size(memory)})", [mode or "none" for mode in modes])


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<25}" + "".join(f"  {cell:>8}" for cell in cells)
