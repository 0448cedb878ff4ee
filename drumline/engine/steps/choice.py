"""Which kind of step a run takes: what its settings ask for, on the device that it has."""

from __future__ import annotations

from collections.abc import Callable

from drumline.config.schema import Config
from drumline.engine.job import Job
from drumline.engine.steps.auto import AutoStep
from drumline.engine.steps.compiled import CompiledStep
from drumline.engine.steps.eager import TrainStep
from drumline.engine.steps.elastic import ElasticStep
from drumline.engine.steps.graph import GraphStep
from drumline.engine.steps.kind import AnyStep
from drumline.errors import UsageError


def _nobody(_: str) -> None:
    """Who listens where there is no log."""


def make_step(
    job: Job,
    config: Config,
    *,
    chosen: str | None = None,
    choose: Callable[[str], None] = _nobody,
    tell: Callable[[str], None] = _nobody,
) -> AnyStep:
    """`chosen`: what `auto` has come to earlier in this run; `choose` is given what it comes to now. `tell` is given
    sentences for the log."""
    if config.train.exact == "elastic":
        return ElasticStep(
            job,
            seed=config.train.seed,
            clip_norm=config.optim.clip_norm,
            bucket_bytes=int(config.dist.bucket_cap_mb * 2**20),
            find_unused=config.dist.find_unused_parameters,
        )
    ways = _ways(job, config, tell)
    if config.train.step == "auto" and chosen not in ways:
        return AutoStep(ways, device=job.ddp.device, choose=choose, tell=tell)
    wanted = chosen if chosen and config.train.step == "auto" else config.train.step
    if wanted not in ways:
        raise UsageError(
            f"--train.step {wanted} needs a GPU, and this rank computes on {job.ddp.device}",
            next_step=f"choose one of {', '.join(ways)}",
        )
    return ways[wanted]()


def _ways(job: Job, config: Config, tell: Callable[[str], None]) -> dict[str, Callable[[], AnyStep]]:
    clip_norm, sends_buffers = config.optim.clip_norm, config.dist.broadcast_buffers

    def eager() -> AnyStep:
        return TrainStep(job, clip_norm=clip_norm, sends_buffers=sends_buffers)

    def compiled() -> AnyStep:
        return CompiledStep(job, clip_norm=clip_norm, sends_buffers=sends_buffers)

    ways: dict[str, Callable[[], AnyStep]] = {"eager": eager, "compile": compiled}
    if job.ddp.device.type == "cuda":
        ways["graph"] = lambda: GraphStep(eager(), job, tell=tell)
        ways["compiled_graph"] = lambda: GraphStep(compiled(), job, tell=tell)
    return ways
