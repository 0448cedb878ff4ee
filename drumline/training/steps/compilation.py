"""`--train.step compile`: every rank compiles before the first compiled step, their results are
compared, and a later recompilation is reported with its reason.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from drumline.base.errors import TrainingError, log
from drumline.base.text import by_rank, duration, named_ranks, plural
from drumline.data.loader import Step
from drumline.rank.collectives import gather_json
from drumline.rank.failure import wait_for_ranks
from drumline.rank.torch_internals import compilations, compiler_counters
from drumline.training.job.job import Job
from drumline.training.run_context import RunContext
from drumline.training.steps import eager
from drumline.training.steps.compiled_blocks import compiled
from drumline.training.steps.warm_up import dry_run
from drumline.watch.heartbeat import COMPILE_FACTOR, Phase

FIRST_STEPS = 5
"""Shapes that vary lead to a second, more general compilation in the first steps, which is
usual."""

_AFTER_BREAK = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")
_ID = re.compile(r"^[\[\]!\d/_]+: ")
_MOST_OF_REASON = 200


def compiled_step(job: Job, **settings: Any) -> eager.AnyStep:
    """`--train.step compile`: the task's loss, with the model's forward and backward pass, compiled
    by torch. The short batch at the end of an epoch is not compiled: that would cost more than it
    gains."""
    is_compiled = False
    full = eager.TrainStep(job, compute_loss=compiled(eager.loss_function(job.task)), **settings)

    job.ddp.connection.mark_compilations()  # the compiler is loaded by now
    short = eager.TrainStep(job, **settings)

    def take(step: Step) -> None:
        """A full batch by the compiled loss, a short one as it is."""
        nonlocal is_compiled
        if step.plan.global_size != job.batch.size:
            short(step)
            return

        if not is_compiled:
            step = _compile_before(step, full.compute_loss, job)
            is_compiled = True

        full(step)

    return take


def _compile_before(step: Step, compute_loss: eager.LossFunction, job: Job) -> Step:
    """Collective: let torch compile the loss for the first micro-batch of this step, where no other
    rank waits in a collective for this one; then wait for the other ranks, and compare. Nothing of
    the job changes. Returns the same step, whose micro-batches are still to be taken."""
    ddp = job.ddp
    first = next(step.micro_batches)

    # to the watchdog a rank that still waits for its batch is behind this one
    job.heartbeat.next_micro()
    job.heartbeat.mark(Phase.FORWARD)

    marks = ddp.connection.compilations
    if marks is not None:
        marks.is_usual_until = job.heartbeat.step + FIRST_STEPS

    before = _counts()

    # Under DDP, by whose buckets the compiler splits the graph, but without its all-reduce.
    applied = job.applied
    local = applied.no_sync() if isinstance(applied, DistributedDataParallel) else nullcontext()
    with dry_run(job), local:
        with job.autocast:
            loss = applied(compute_loss, first.data)
        (loss.total * 0.0).backward()

    job.optimizer.zero_grad(set_to_none=True)

    if ddp.world_size > 1:
        made = {name: count - before[name] for name, count in _counts().items()}
        _wait_for_ranks(job)
        everyone = gather_json({**made, "host": ddp.host})

        difference = find_difference(everyone)
        if ddp.is_main_process() and difference is not None:
            log.warning(
                f"ranks differ in what torch.compile made of {type(job.task).__name__}.loss(): {difference}. Try: let "
                "the loss do the same on every rank; TORCH_LOGS=graph_breaks,guards shows where it differs"
            )

    return step._replace(micro_batches=chain([first], step.micro_batches))


def _counts() -> dict[str, int]:
    """What torch's compiler has counted in this process."""
    counters = compiler_counters()
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": counters["graph_break"].total(),
        "guards": sum(metrics.guard_count or 0 for metrics in compilations()),
    }


def _wait_for_ranks(job: Job) -> None:
    """Collective, through the store: a collective of the group would time out while a rank
    compiles."""
    ddp = job.ddp
    store = ddp.connection.store
    assert store is not None

    job.heartbeat.mark(Phase.COMPILED)

    # The watchdog, which names the rank, acts before.
    limit_s = COMPILE_FACTOR * ddp.train_timeout_s
    missing = wait_for_ranks(
        store,
        f"compiled/{job.heartbeat.step}",
        ddp.rank,
        ddp.world_size,
        limit_s=limit_s,
    )

    if missing:
        raise TrainingError(
            f"{named_ranks(missing)} did not finish torch.compile within {duration(limit_s)}",
            next_step="use --train.step eager, or raise --dist.train_timeout_s: the limit is a multiple of it",
        )


def find_difference(everyone: Sequence[Mapping[str, Any]]) -> str | None:
    """What each rank's compiler made, if it is not the same on all of them, such as `2 graphs, 1
    graph break, 40 guards`."""
    nouns = {"graphs": "graph", "breaks": "graph break", "guards": "guard"}
    made = [
        ", ".join(plural(rank_counts[name], noun) for name, noun in nouns.items())
        for rank_counts in everyone
    ]

    return by_rank(made, [counts["host"] for counts in everyone]) if len(set(made)) > 1 else None


def report_recompilations(context: RunContext, first_step: int) -> None:
    """Collective: warn about each function that torch has compiled again since the last call,
    once."""
    ddp = context.job.ddp
    marks = ddp.connection.compilations
    recompilations = []
    reported: set[str] = set()

    if marks is not None:
        reported = marks.reported
        usual_until = max(marks.is_usual_until, first_step + FIRST_STEPS)
        everything = _recompiled(marks.began_at)
        recompilations = [record for record in everything if record["step"] >= usual_until]
        marks.began_at.clear()

    everyone = gather_json(recompilations)
    for function, message in describe_recompilations(everyone, type(context.job.task).__name__):
        if ddp.is_main_process() and function not in reported:
            context.warn(message)
        reported.add(function)


def _recompiled(began_at: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """The compilations that replaced an earlier one. `began_at`: the step of each, by its id."""
    # After a reset of the compiler the ids begin again.
    newest: dict[Any, Any] = {
        metrics.compile_id: metrics for metrics in compilations() if metrics.co_name
    }

    for number, metrics in newest.items():
        if number not in began_at or not metrics.recompile_reason:
            continue

        name = _AFTER_BREAK.sub(r"\1", metrics.co_name)
        file = Path(metrics.co_filename).name
        function = f"{name} ({file}:{metrics.co_firstlineno})"

        if metrics.co_filename == eager.__file__:
            # the task's loss, which is compiled inside a function of ours
            function = ""

        first_line = _ID.sub("", metrics.recompile_reason.partition("\n")[0])
        yield {
            "function": function,
            "step": began_at[number],
            "reason": " ".join(first_line.split())[:_MOST_OF_REASON],
        }


def describe_recompilations(
    everyone: Sequence[Sequence[Mapping[str, Any]]], task: str
) -> Iterator[tuple[str, str]]:
    """The functions, each with a warning: where, why, and what to do."""
    by_function = defaultdict[str, dict[int, Mapping[str, Any]]](dict)
    for rank, recompilations in enumerate(everyone):
        for record in recompilations:
            by_function[record["function"]].setdefault(rank, record)

    for function, records in by_function.items():
        record = min(records.values(), key=itemgetter("step"))
        reason = record["reason"]
        advice = "keep what changes from step to step in a tensor, not in a number or an attribute"
        if "size mismatch" in reason or ".size()" in reason or "stride" in reason:
            advice = "pad batches to a few fixed lengths, in the task's collate for example"

        yield (
            function,
            f"torch compiled {function or f'{task}.loss()'} again at step {record['step']} on "
            f"{named_ranks(list(records))}: {reason}. "
            "All ranks wait while it compiles, and after several times torch runs it uncompiled. "
            f"Try: {advice}; TORCH_LOGS=recompiles shows every one",
        )
