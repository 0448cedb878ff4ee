"""A task's own metrics: every rank updates them with its evaluation batches, and rank 0 merges all
ranks' states, in their order, and computes the values once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drumline.base.errors import UsageError
from drumline.checkpoint.optimizer_state import decode_state, encode_state
from drumline.checkpoint.rank_states import gather_states
from drumline.metrics.meters import check_names
from drumline.rank.collectives import broadcast_json
from drumline.training.manager import RunManager
from drumline.training.tasks.base import Metric, Task

NEEDED = ("update", "compute", "reset", "metric_state", "merge_state")
INSTEAD = "write a merge_state for it, give it as sums with Loss(metrics=...), or train on one rank"


def make_metrics(task: Task, ddp: RunManager) -> dict[str, Metric]:
    """Those of the task, on the device. What could not be merged on several ranks is refused
    there."""
    metrics = {name: _without_groups(metric) for name, metric in task.metrics().items()}
    check_names(metrics)
    for name, metric in metrics.items():
        needed = NEEDED[:3] if _is_collection(metric) else NEEDED  # its members have the rest
        # By its class where that has it: a property may need an update first.
        missing = [
            method
            for method in needed
            if not hasattr(type(metric), method) and not hasattr(metric, method)
        ]
        if missing:
            raise UsageError(
                f"the metric {name!r} has no {' and no '.join(missing)}",
                next_step=f"return torchmetrics' metrics, or objects with {', '.join(NEEDED)}",
            )
        if isinstance(metric, nn.Module):
            metric.to(ddp.device)
        for place, part in _parts(metric).items():
            # torchmetrics would add up the ranks by itself, and again.
            if hasattr(part, "sync_on_compute"):
                vars(part).update(sync_on_compute=False, _to_sync=False)
            if ddp.world_size > 1:
                _check_merge(f"{name}/{place}" if _is_collection(metric) else name, part)
    return metrics


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
    tensor without a reduction is for."""
    for key, reduction in getattr(metric, "_reductions", {}).items():
        if getattr(reduction, "__name__", "") == "dim_zero_mean":
            return f"its {key} is a mean, of which merge_state does not know the weight"
        if reduction is None and isinstance(metric.metric_state[key], Tensor):
            return f"its {key} has no dist_reduce_fx"
    return None


def _parts(metric: Metric) -> dict[str, Metric]:
    """What holds states, by name: the wrappers of torchmetrics have them in metrics inside them,
    whose `_defaults` some of them share."""
    modules = metric.named_modules() if isinstance(metric, nn.Module) else ()
    inside = {
        id(vars(module)["_defaults"]): (name, module)
        for name, module in modules
        if vars(module).get("_defaults")
    }
    holders: dict[str, Any] = dict(inside.values())
    return holders or {"": metric}


def update_metrics(metrics: Mapping[str, Metric], outputs: Any) -> None:
    """With the `Loss.outputs` of one batch."""
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
    metrics: Mapping[str, Metric], ddp: RunManager, *, is_updated: bool
) -> dict[str, Any]:
    """Collective: the values by name, the same on every rank. `is_updated`: this rank has had a
    batch; rank 0 has."""
    if not metrics:
        return {}
    tensors: dict[str, Tensor] = {}
    document = None
    if is_updated:  # else it may have no state
        states = {
            name: {place: dict(part.metric_state) for place, part in _parts(metric).items()}
            for name, metric in metrics.items()
        }
        document = encode_state(states, "metrics", tensors)
    gathered, tensors = gather_states(document, tensors)
    values: dict[str, Any] = {}
    if ddp.is_main_process():
        # Into rank 0's own: torchmetrics takes one without an update of its own for empty.
        for rank, document in enumerate(gathered["ranks"]):
            if rank > 0 and document is not None:
                _merge_rank(metrics, document, tensors, rank, device=ddp.device)
        for name, metric in metrics.items():
            values.update(_values(name, metric.compute()))
    merged: dict[str, Any] = broadcast_json(values)
    return merged


def _merge_rank(
    metrics: Mapping[str, Metric],
    document: Any,
    tensors: Mapping[str, Tensor],
    rank: int,
    *,
    device: torch.device,
) -> None:
    """Add the states of this rank, whose tensors have its number before their name."""
    prefix = f"{rank}/"
    tensors_of_rank = {
        name.removeprefix(prefix): tensor.to(device)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    states = decode_state(document, tensors_of_rank.__getitem__)
    for name, metric in metrics.items():
        for place, part in _parts(metric).items():
            part.merge_state(states[name][place])


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A number, a nested list, or those of a dict, each as NAME/KEY."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _values(f"{name}/{key}", part)
    else:
        yield name, _plain(name, value)


def _plain(name: str, value: Any) -> Any:
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(name, entry) for entry in value]
    if isinstance(value, bool | int | float):
        return float(value) if isinstance(value, bool) else value
    raise UsageError(
        f"the metric {name!r} computed a {type(value).__name__}",
        next_step="let compute() return a number, a tensor, a list or a dict of these",
    )
