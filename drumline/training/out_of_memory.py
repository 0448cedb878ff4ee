"""Out of memory: which setting makes the model, a step or an evaluation need less."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drumline.base.errors import TrainingError
from drumline.base.text import memory_size
from drumline.config.schema import Config
from drumline.data.sharding import Cursor, plan_step
from drumline.parallel.shards import own_part
from drumline.training.between_steps.evaluation import evaluate
from drumline.training.job.job import Job
from drumline.training.manager import RunManager
from drumline.training.steps.capture_checks import user_line
from drumline.training.steps.eager import TrainStep


@contextmanager
def explain_out_of_memory(
    config: Config, ddp: RunManager, job: Job | None = None
) -> Iterator[None]:
    """Name the setting that needs less memory. `job`: None while it is built."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _explained(error, ddp, config, job) from error


def _explained(
    error: torch.OutOfMemoryError, ddp: RunManager, config: Config, job: Job | None
) -> TrainingError:
    peak = ""
    used = 0
    if ddp.device.type == "cuda":
        used = torch.cuda.max_memory_reserved(ddp.device)
        total = torch.cuda.mem_get_info(ddp.device)[1]
        peak = f"; the most that this rank has held is {memory_size(used)} of {memory_size(total)}"
    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if job is not None and evaluate.__name__ in functions:
        next_step = f"--train.eval_batch_size {max(1, config.train.eval_batch_size // 2)}, half of what it is"
    elif job is None or TrainStep._update.__name__ in functions or (peak and _held(job) > used / 2):
        next_step = _hold_less(config.dist.mode, ddp.world_size)
    else:
        next_step = _compute_less(job, config)
    return TrainingError(
        f"out of memory{user_line(error)}: {str(error).partition('. GPU')[0]}{peak}",
        next_step=next_step,
    )


def _hold_less(mode: str, world_size: int) -> str:
    """The model, its gradients and the optimizer's state, however small the batch is."""
    if mode == "fsdp" and world_size > 1:
        return "--dist.offload_optimizer, more GPUs or a smaller model"
    on_several = "" if world_size > 1 else " on several GPUs"
    return (
        f"--dist.mode fsdp{on_several}, which shards the model and the optimizer's state over the ranks (drumline plan "
        "TASK shows what each mode needs)"
    )


def _held(job: Job) -> int:
    """Bytes of the parameters, their gradients and the optimizer's state, of which a smaller batch
    changes nothing."""
    held = [
        tensor
        for state in job.optimizer.state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor)
    ]
    for parameter in job.model.parameters():
        held += [parameter] if parameter.grad is None else [parameter, parameter.grad]
    return sum(own_part(tensor).nbytes for tensor in held)


def _compute_less(job: Job, config: Config) -> str:
    """Half of the largest micro-batch."""
    spans = plan_step(Cursor(), length=job.batch.size, sharding=job.loader.sharding).spans
    at_once = max(span.size for span in spans)
    if at_once <= 1:
        shards = (
            ", --dist.mode fsdp" if config.dist.mode == "ddp" and job.ddp.world_size > 1 else ""
        )
        return (
            f"--model.activation_checkpointing, --train.precision bf16{shards} or a smaller model: a micro-batch is "
            "one sample"
        )
    instead = " in place of --train.accumulate" if config.train.accumulate > 1 else ""
    return (
        f"--train.micro_batch_size {at_once // 2}{instead}, half of the {at_once} samples that a rank now computes at "
        "once; the global batch stays as it is (drumline find-batch measures what fits)"
    )
