"""Evaluations: what one works on (the model, the evaluation sets and the task's metrics), and how it
is done, with the same numbers on any number of ranks. The job of a training run (`job`) has these and
more; a checkpoint is evaluated without training data and without an optimizer.

Each batch holds the same samples on any number of ranks. One rank computes its row (loss, weight,
sums of metrics), all rows meet in a table, and each column is added up with exact rounding. Metrics
that are objects, as torchmetrics has them, are updated on each rank, and merged on rank 0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from drumline.base.errors import TrainingError, UsageError
from drumline.base.text import print_message
from drumline.checkpoint.optimizer_state import encode_state
from drumline.checkpoint.rank_states import gather_states, state_of_rank
from drumline.config.schema import Config, TrainConfig
from drumline.data.bucket_copy import BucketCopy
from drumline.data.dataset import fingerprint
from drumline.data.loader import EvaluationLoader
from drumline.metrics.meters import check_names, means
from drumline.parallel.sharded_model import ShardedModel
from drumline.parallel.wrap import LiveBuffers, gains_from_channels_last, unwrap_model
from drumline.rank.collectives import all_sum, broadcast_json, check_same
from drumline.rank.failure import wait_for_ranks
from drumline.storage.object_store import is_store_url
from drumline.training.manager import RunManager
from drumline.training.tasks.base import Metric, Task, evaluation_mode
from drumline.watch.heartbeat import HeartbeatWriter, Phase

CACHE = Path(".cache", "drumline", "data")
# Of each group: a rank that joins a later one has not called it as often.
_CALLS: WeakKeyDictionary[RunManager, Iterator[int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class EvaluationJob:
    """What evaluations, and hooks around them, work on."""

    task: Task
    ddp: RunManager
    model: nn.Module
    """The task's own model, on the device."""

    autocast: AbstractContextManager[object]
    eval_loaders: Mapping[str, EvaluationLoader]
    """The evaluation sets by name; a single one is called ''."""

    metrics: Mapping[str, Metric]
    """The task's own, for evaluations."""

    @property
    def heartbeat(self) -> HeartbeatWriter:
        return self.ddp.connection.heartbeat

    @property
    def sharded(self) -> ShardedModel | None:
        """The wrapped model of a training run, if it is sharded (`--dist.mode`): a forward pass is then
        collective."""
        return None

    @property
    def eval_samples(self) -> int | None:
        """Of all evaluation sets; None if the length of a stream is not known yet."""
        sizes = [loader.num_samples for loader in self.eval_loaders.values()]
        return None if None in sizes else sum(filter(None, sizes))

    def reported(self, means: dict[str, float]) -> dict[str, float]:
        """The numbers for the log: the task's `report` of the means, which may add some: a
        perplexity."""
        numbers = self.task.report(means)
        check_names(numbers)
        return numbers

    def close(self) -> None:
        """End the processes that load data."""
        for loader in self.eval_loaders.values():
            loader.close()


def build_evaluation_job(
    config: Config,
    task: Task,
    ddp: RunManager,
    sets: Mapping[str, Any],
    *,
    has_metrics: bool = True,
) -> EvaluationJob:
    """Collective: build the model, as a training run has it, and the loaders of these sets, and
    compare them across ranks. `has_metrics`: whether the task's own are measured. The weights are
    random until they are restored."""
    ddp.connection.heartbeat.mark(Phase.START)
    set_arithmetic(config.train, ddp.device)
    check_same_data(ddp, evaluation_facts(sets))
    loaders = make_eval_loaders(config, task, ddp, sets)

    model = task.model()
    channels_last = is_channels_last(config.train, model, ddp.device)
    wrapped = ddp.wrap_applied(model, channels_last=channels_last, reduces_gradients=False)

    return EvaluationJob(
        task=task,
        ddp=ddp,
        model=unwrap_model(wrapped),
        autocast=make_autocast(config.train.precision, ddp.device),
        eval_loaders=loaders,
        metrics=make_metrics(task, ddp) if has_metrics else {},
    )


def evaluation_sets(task: Task) -> dict[str, Any]:
    """The datasets by name; '' for a single one. `eval_data()` may return one dataset, a dict of
    several, or None."""
    data = task.eval_data()
    if isinstance(data, Mapping) and all(isinstance(name, str) for name in data):
        return dict(data)
    return {} if data is None else {"": data}


def evaluation_facts(sets: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on every rank: the names of the sets, and a fingerprint of each."""
    facts: dict[str, Any] = {"the evaluation sets": list(sets)}
    for name, data in sets.items():
        facts[f"the evaluation data {name}".rstrip()] = fingerprint(data)
    return facts


def check_same_data(ddp: RunManager, facts: Mapping[str, Any]) -> None:
    """Collective. The rendezvous has compared versions, settings and code."""
    check_same(
        facts,
        host=ddp.host,
        next_step="start every rank with the same command, packages and data (data.dir and data.cache may differ)",
    )


def loading_options(config: Config, task: Task) -> dict[str, Any]:
    """How `DDPManager.loader` reads the task's data."""
    names = ("workers", "pin_memory", "persistent_workers", "prefetch_factor")
    return {"collate": task.collate, **{name: getattr(config.data, name) for name in names}}


def make_eval_loaders(
    config: Config,
    task: Task,
    ddp: RunManager,
    sets: Mapping[str, Any],
) -> dict[str, EvaluationLoader]:
    """Of sets that `check_same_data` has compared."""
    return {
        name: ddp.loader(
            data,
            train=False,
            batch_size=config.train.eval_batch_size,
            compare=False,
            **loading_options(config, task),
        )
        for name, data in sets.items()
    }


def with_local_data(config: Config, ddp: RunManager) -> Config:
    """Collective: the settings, with `data.dir` as the path of a copy where it is a URL: one rank
    of each machine copies the data to its disk before the job is built."""
    url = config.data.dir
    if url is None or not is_store_url(url):
        return config

    heartbeat = ddp.connection.heartbeat
    copy = BucketCopy(
        url=url,
        cache=Path(config.data.cache or Path.home() / CACHE).absolute(),
        report=print_message if ddp.is_main_process() else lambda text: None,
        alive=lambda: heartbeat.mark(Phase.START),
    )

    if ddp.get_local_rank() == 0:
        copy.update()

    if ddp.connection.store is not None:
        # with --dist.mode auto there are two
        what = f"data-copied/{next(_CALLS.setdefault(ddp, count()))}"
        # A download has no limit here: the watchdog observes it, and one that fails ends the job.
        wait_for_ranks(ddp.connection.store, what, ddp.rank, ddp.world_size, limit_s=math.inf)

    return replace(config, data=replace(config.data, dir=str(copy.folder)))


def set_arithmetic(train: TrainConfig, device: torch.device) -> None:
    """Set TF32 and cuDNN's search for kernels, for the whole process."""
    if device.type != "cuda":
        return

    if train.tf32 != "auto":
        is_allowed = {"on": True, "off": False}[train.tf32]
        torch.backends.cuda.matmul.allow_tf32 = is_allowed
        torch.backends.cudnn.allow_tf32 = is_allowed

    torch.backends.cudnn.benchmark = train.cudnn_benchmark


def make_autocast(
    precision: Literal["fp32", "bf16", "fp16"], device: torch.device
) -> AbstractContextManager[object]:
    """A context for forward passes, made once and entered in every step. fp32 needs none."""
    if precision == "fp32":
        return nullcontext()

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, dtype=dtypes[precision])


def is_channels_last(train: TrainConfig, model: nn.Module, device: torch.device) -> bool:
    """Whether the model's images have their channels last in memory: tensor cores are faster with
    it; on the CPU it gains little."""
    if train.memory_format == "auto":
        return device.type == "cuda" and gains_from_channels_last(model)

    return {"contiguous": False, "channels_last": True}[train.memory_format]


NEEDED = ("update", "compute", "reset", "metric_state", "merge_state")
INSTEAD = "write a merge_state for it, give it as sums with Loss(metrics=...), or train on one rank"


def make_metrics(task: Task, ddp: RunManager) -> dict[str, Metric]:
    """Those of the task, on the device. What could not be merged on several ranks is refused there,
    before the first step."""
    metrics = {name: _without_groups(metric) for name, metric in task.metrics().items()}
    check_names(metrics)

    for name, metric in metrics.items():
        _check_methods(name, metric)
        if isinstance(metric, nn.Module):
            metric.to(ddp.device)

        for place, part in _parts(metric).items():
            # torchmetrics would add up the ranks by itself, and again.
            if hasattr(part, "sync_on_compute"):
                vars(part).update(sync_on_compute=False, _to_sync=False)

            if ddp.world_size > 1:
                _check_merge(f"{name}/{place}" if _is_collection(metric) else name, part)

    return metrics


def _check_methods(name: str, metric: Any) -> None:
    """Refuse an object that is no metric, or whose state could not be merged."""
    # The members of a collection have the rest.
    needed = NEEDED[:3] if _is_collection(metric) else NEEDED

    # By its class: a property may need an update first.
    missing = [method for method in needed if not hasattr(type(metric), method)]
    if missing:
        raise UsageError(
            f"the metric {name!r} has no {' and no '.join(missing)}",
            next_step=f"return torchmetrics' metrics, or objects with {', '.join(NEEDED)}",
        )


def _is_collection(metric: Any) -> bool:
    """Whether it is a MetricCollection of torchmetrics, which is not imported for this."""
    return isinstance(metric, getattr(sys.modules.get("torchmetrics"), "MetricCollection", ()))


def _without_groups(metric: Any) -> Any:
    """A MetricCollection updates one metric of a group, and each rank would form its groups from
    its first batch."""
    if not _is_collection(metric):
        return metric
    members = dict(metric.items(keep_base=True, copy_state=False))
    return type(metric)(members, prefix=metric.prefix, postfix=metric.postfix, compute_groups=False)


def _check_merge(name: str, metric: Metric) -> None:
    """Refuse what torchmetrics' own merge_state cannot merge, or merges wrongly. One that was
    written for the metric is not tried: a state without updates is nothing that it must expect."""
    if getattr(type(metric).merge_state, "__module__", "") != "torchmetrics.metric":
        return

    problem = _unweighted(metric)
    try:
        metric.merge_state(metric.metric_state)
    except (RuntimeError, NotImplementedError) as error:
        problem = str(error)

    metric.reset()
    if problem is not None:
        raise UsageError(
            f"the metric {name!r} cannot be merged over ranks: {problem}", next_step=INSTEAD
        )


def _unweighted(metric: Metric) -> str | None:
    """What merge_state gets wrong: it does not know how many updates a mean is of, nor what a
    tensor without a reduction is for. None: nothing."""
    for key, reduction in getattr(metric, "_reductions", {}).items():
        if getattr(reduction, "__name__", "") == "dim_zero_mean":
            return f"its {key} is a mean, of which merge_state does not know the weight"

        if reduction is None and isinstance(metric.metric_state[key], Tensor):
            return f"its {key} has no dist_reduce_fx"

    return None


def _parts(metric: Metric) -> dict[str, Metric]:
    """What holds states, by name: the wrappers of torchmetrics have them in metrics inside them,
    whose `_defaults` some of them share. Of a plain metric it is the metric itself, as ''."""
    if not isinstance(metric, nn.Module):
        return {"": metric}

    holders: dict[int, tuple[str, Any]] = {}
    for name, module in metric.named_modules():
        defaults = vars(module).get("_defaults")
        if defaults:
            holders[id(defaults)] = (name, module)

    return dict(holders.values()) or {"": metric}


def update_metrics(metrics: Mapping[str, Metric], outputs: Any) -> None:
    """With the `Loss.outputs` of one batch: a dict gives arguments by name, a tuple or list by
    position."""
    if metrics and outputs is None:
        raise UsageError(
            "the task has metrics(), but its loss() returns no outputs to update them with",
            next_step="return Loss(total, outputs=(scores, labels))",
        )

    for metric in metrics.values():
        if isinstance(outputs, Mapping):
            metric.update(**outputs)
        elif isinstance(outputs, tuple | list):
            metric.update(*outputs)
        else:
            metric.update(outputs)


def compute_metrics(
    metrics: Mapping[str, Metric],
    ddp: RunManager,
    *,
    is_updated: bool,
) -> dict[str, Any]:
    """Collective: the values by name, the same on every rank. `is_updated`: this rank has had a
    batch; rank 0 has. Rank 0 merges the states of all ranks into its own, and computes."""
    if not metrics:
        return {}

    parts = [part for metric in metrics.values() for part in _parts(metric).values()]
    tensors: dict[str, Tensor] = {}
    document = None
    if is_updated:  # else it may have no state
        document = encode_state([dict(part.metric_state) for part in parts], "metrics", tensors)

    gathered, tensors = gather_states(document, tensors)

    values: dict[str, Any] = {}
    if ddp.is_main_process():
        tensors = {name: tensor.to(ddp.device) for name, tensor in tensors.items()}
        _merge_ranks(parts, gathered, tensors)
        for name, metric in metrics.items():
            values.update(_values(name, metric.compute()))

    merged: dict[str, Any] = broadcast_json(values)
    return merged


def _merge_ranks(
    parts: Sequence[Metric], gathered: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """On rank 0: add what the other ranks have measured to its own metrics. torchmetrics takes one
    without an update of its own for empty."""
    for rank, document in enumerate(gathered["ranks"]):
        if rank == 0 or document is None:
            continue

        states = state_of_rank(gathered, tensors, rank)
        for part, state in zip(parts, states, strict=True):
            part.merge_state(state)


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A number, a nested list, or those of a dict, each as NAME/KEY: `f1/macro`."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _values(f"{name}/{key}", part)
    else:
        yield name, _plain(name, value)


def _plain(name: str, value: Any) -> Any:
    """A number or nested lists of numbers, as JSON has them. A bool is 0 or 1."""
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()

    if isinstance(value, list | tuple):
        return [_plain(name, entry) for entry in value]
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        return value

    raise UsageError(
        f"the metric {name!r} computed a {type(value).__name__}",
        next_step="let compute() return a number, a tensor, a list or a dict of these",
    )


@torch.no_grad()
def evaluate(job: EvaluationJob) -> dict[str, Any]:
    """Collective: the mean loss and all metrics of the model, as it is now, over every sample of
    each evaluation set. Those of a set with a name are called `NAME/METRIC`.

        {"loss": 0.31, "accuracy": 0.91}
        {"clean/loss": 0.31, "clean/accuracy": 0.91, "noisy/loss": 0.64, "noisy/accuracy": 0.8}
    """
    job.heartbeat.mark(Phase.EVALUATION)
    LiveBuffers(job.model).broadcast()
    metrics: dict[str, Any] = {}

    with evaluation_mode(job.task, job.model):
        for name, loader in job.eval_loaders.items():
            prefix = f"{name}/" if name else ""
            for metric, value in _evaluate_set(job, loader).items():
                metrics[prefix + metric] = value

    return metrics


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that are one number each, and not a matrix or a curve: these can be compared and
    plotted."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def _evaluate_set(job: EvaluationJob, loader: EvaluationLoader) -> dict[str, Any]:
    """Collective. A batch holds the same samples whatever the world size, every batch is summed by
    one rank, and the sums are added with exact rounding, in any order."""
    for metric in job.metrics.values():
        metric.reset()

    names, rows = _sum_batches(job, loader)

    # Rank 0 always has the first batch; a rank without a batch gets the names from it.
    batches_here = [loader.num_batches, loader.digest]
    names, expected = broadcast_json([names, batches_here])

    # They differ only for a stream: other datasets were compared before the first step.
    if batches_here != expected:
        raise TrainingError(
            f"rank {job.ddp.rank} read {batches_here[0]} other evaluation batches from its stream than rank 0, which "
            f"read {expected[0]}",
            next_step="let every rank read the whole evaluation stream in one order: Drumline splits it by batches",
        )

    table = torch.zeros(expected[0], 2 + len(names), dtype=torch.float64, device=job.ddp.device)
    for number, row in rows.items():
        table[number] = row

    sums = [math.fsum(column) for column in all_sum(table).cpu().T.tolist()]
    reported = job.reported(means(sums, names))
    measured = compute_metrics(job.metrics, job.ddp, is_updated=bool(rows))

    repeated = sorted(reported.keys() & measured.keys())
    if repeated:
        raise TrainingError(
            f"loss() or report() and metrics() both report {', '.join(repeated)}",
            next_step="rename one of them",
        )

    return {**reported, **measured}


def _sum_batches(
    job: EvaluationJob, loader: EvaluationLoader
) -> tuple[list[str], dict[int, Tensor]]:
    """The names of the metrics, and for each batch number a row: loss, weight, metrics. Nothing is
    added up here: a sum in floating point depends on the order."""
    names: list[str] = []
    rows = {}
    for number, size, data in loader.numbered(padded=job.sharded is not None):
        job.heartbeat.mark(Phase.EVALUATION)  # so that a long evaluation shows progress
        with job.autocast:
            loss = job.task.loss(job.model, job.task.on_device(data))

        if size == 0:  # only to gather the parameters with the other ranks
            continue

        update_metrics(job.metrics, loss.outputs)
        names = list(loss.metrics)
        weight = size if loss.weight is None else loss.weight

        row = [
            torch.as_tensor(value, device=job.ddp.device).double()
            for value in (loss.total, weight, *loss.metrics.values())
        ]
        rows[number] = torch.stack(row)

    return names, rows
