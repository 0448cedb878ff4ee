"""Hooks for what most people need: an average of the weights, early stopping, unfreezing, samples
in the log.

    def hooks(self):
        return [drumline.EMA(0.999), drumline.EarlyStopping("accuracy", patience=5)]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from drumline.base.errors import UsageError, did_you_mean, log
from drumline.base.text import plural
from drumline.checkpoint.state import model_state
from drumline.parallel.shards import own_part
from drumline.rank.determinism import keeping_rng
from drumline.rank.torch_internals import live_buffers, live_parameters, pytree
from drumline.training.tasks.base import evaluation_mode
from drumline.training.tasks.hook import Hook, Run


class EMA(Hook):
    """Keeps an exponential moving average of the weights, evaluates with it, and saves it in every
    checkpoint: `average = decay * average + (1 - decay) * weights` after every `every_steps` steps,
    from the first weights on.

    Buffers of floating point (BatchNorm's statistics) are averaged too, others copied. 16-bit
    weights have an average in 32 bits. Training continues with the weights themselves. With
    `--dist.sync` it is that of the shared weights."""

    def __init__(self, decay: float = 0.999, *, every_steps: int = 1) -> None:
        if not 0.0 <= decay < 1.0:
            raise UsageError(
                f"EMA's decay is {decay}",
                next_step="use a number from 0 up to, but not including, 1",
            )

        self.every_steps = every_steps
        self.average: dict[str, Tensor] = {}
        """By the names of the model's `state_dict`; a tensor that has several names is there
        once."""

        self._update: Callable[..., None] = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._trained: list[Tensor] = []

    @torch.no_grad()
    def start(self, run: Run) -> None:
        """Begin with the weights, or continue with the average of the checkpoint."""
        self._places = _places(run.model)
        with run.shared_weights():
            now = dict(zip(self._places, self._now(), strict=True))
            before = self.average or now

            different = sorted(before.keys() ^ now.keys())
            if different:
                raise UsageError(
                    f"the average in the checkpoint is of another model: {', '.join(different[:5])}",
                    next_step="start a new run with --fresh, or take EMA out of hooks() for this one",
                )

            self.average = {
                name: torch.empty_like(tensor, dtype=_average_type(tensor)).copy_(before[name])
                for name, tensor in now.items()
            }

    @torch.no_grad()
    def after_step(self, run: Run) -> None:
        """Add the weights of this step to the average."""
        averages = []
        weights = []
        with run.shared_weights():
            for average, now in zip(self.average.values(), self._now(), strict=True):
                if average.is_floating_point():
                    averages.append(own_part(average))
                    weights.append(own_part(now).to(average.dtype))
                else:
                    own_part(average).copy_(own_part(now))

            self._update(averages, weights, None)

    @torch.no_grad()
    def before_evaluation(self, run: Run) -> None:
        """Put the average in the place of the weights."""
        self._trained = [tensor.clone() for tensor in self._now()]
        for tensor, average in zip(self._now(), self.average.values(), strict=True):
            tensor.copy_(average)

    @torch.no_grad()
    def after_evaluation(self, run: Run) -> None:
        """Continue with the weights as trained."""
        for tensor, trained in zip(self._now(), self._trained, strict=True):
            tensor.copy_(trained)
        self._trained = []

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average = dict(state["average"])

    def _now(self) -> list[Tensor]:
        """The tensors that are averaged, as they are at this moment: a forward pass may replace a
        buffer."""
        return [tensors[name] for tensors, name in self._places.values()]


def _places(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """By name: where the modules keep the tensors that a checkpoint holds. A place is a module's
    dict of tensors, and the key in it."""
    places = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        holders: list[dict[str, Any]] = [live_parameters(module), live_buffers(module)]
        for tensors in holders:
            for name in tensors:
                places[f"{prefix}.{name}".lstrip(".")] = (tensors, name)
    return {name: places[name] for name in model_state(model)[0] if name in places}


def _average_type(tensor: Tensor) -> torch.dtype:
    """The type of an average: 16 bits would lose small changes."""
    is_short = tensor.is_floating_point() and tensor.element_size() < 4
    return torch.float32 if is_short else tensor.dtype


class EarlyStopping(Hook):
    """Ends the run when a metric of the evaluation has not improved by more than `min_delta` in
    `patience` evaluations in a row. A metric that is not finite has not improved. A run that was
    stopped and is then made longer counts anew.

    `higher_is_better` need not be given for a loss, nor for the task's `best_metric`, where it is
    the task's."""

    def __init__(
        self,
        metric: str = "loss",
        patience: int = 3,
        *,
        min_delta: float = 0.0,
        higher_is_better: bool | None = None,
    ) -> None:
        if patience < 1 or min_delta < 0:
            raise UsageError(
                f"EarlyStopping has patience {patience} and min_delta {min_delta}",
                next_step="use a patience from 1 on, and a min_delta from 0 on",
            )

        self._metric = metric
        self._patience = patience
        self._min_delta = min_delta
        self._higher_is_better = higher_is_better
        self.best: float | None = None
        self.num_without = 0
        """Evaluations since the best."""

    def start(self, run: Run) -> None:
        """Decide which values are better, and refuse a metric where that is unknown."""
        if self._higher_is_better is None and self._metric == run.task.best_metric:
            self._higher_is_better = run.task.higher_is_better

        is_loss = self._metric.rpartition("/")[2] == "loss"
        if self._higher_is_better is None and not is_loss:
            raise UsageError(
                f"whether a higher {self._metric} is better is not known",
                next_step="give EarlyStopping higher_is_better=True or False",
            )

        if not run.has_eval_data and run.rank == 0:
            log.warning(
                "EarlyStopping never stops this run: there is no eval_data(), so nothing is evaluated"
            )

    def after_evaluation(self, run: Run) -> None:
        """Compare the metric with the best so far, and end the run if it has not improved for too
        long."""
        value = run.metrics.get(self._metric)
        if not isinstance(value, int | float):
            numbers = [name for name in run.metrics if isinstance(run.metrics[name], int | float)]
            raise UsageError(
                f"the evaluation does not report {self._metric!r}: {did_you_mean(self._metric, numbers)}",
                next_step="give EarlyStopping a metric of the evaluation",
            )

        sign = 1.0 if self._higher_is_better else -1.0
        is_better = self.best is None or sign * (value - self.best) > self._min_delta
        if math.isfinite(value) and is_better:
            self.best = float(value)
            self.num_without = 0
            return

        self.num_without += 1
        if self.num_without >= self._patience:
            best = "" if self.best is None else f"; the best was {self.best:.6g}"
            run.stop(
                f"{self._metric} has not improved in {plural(self.num_without, 'evaluation')}{best}"
            )
            self.num_without = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_without": self.num_without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = state["best"]
        self.num_without = state["num_without"]


class Unfreeze(Hook):
    """Trains the parameters whose names begin with one of `prefixes` only after `at_step` steps.
    Until then they have no gradient, and the optimizer leaves them and their state alone. Several
    of these unfreeze a model bit by bit.

    What is never trained needs no hook: set `requires_grad` to False in `model()`."""

    def __init__(self, *prefixes: str, at_step: int) -> None:
        self._prefixes = prefixes
        self._at_step = at_step
        self._parameters: list[nn.Parameter] = []

    def start(self, run: Run) -> None:
        """Check the names, and freeze the parameters, unless their step is over."""
        _check_can_unfreeze(run)
        parameters = dict(run.model.named_parameters())
        for prefix in self._prefixes:
            if not any(name.startswith(prefix) for name in parameters):
                raise UsageError(
                    f"no parameter's name begins with {prefix!r}: {did_you_mean(prefix, parameters)}",
                    next_step="give Unfreeze the beginning of names, as model.named_parameters() has them",
                )

        trained = {p for group in run.optimizer.param_groups for p in group["params"]}
        chosen = [name for name in parameters if name.startswith(self._prefixes)]
        for name in chosen:
            if parameters[name] not in trained:
                raise UsageError(
                    f"{name} is not in the optimizer, so it cannot be unfrozen",
                    next_step="leave requires_grad on in model(): Unfreeze turns it off until its step",
                )

        self._parameters = [parameters[name] for name in chosen]
        self._set(run.step >= self._at_step)

    def after_step(self, run: Run) -> None:
        """Unfreeze at the step."""
        if run.step == self._at_step:
            self._set(True)
            begin_momentum(run.optimizer, self._parameters)

    def _set(self, is_trained: bool) -> None:
        """Whether the parameters get gradients from now on."""
        for parameter in self._parameters:
            parameter.requires_grad_(is_trained)


def begin_momentum(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Create the momentum of these parameters, zeros: torch's fused SGD takes it of all parameters
    or of none, and does not set what it allocates in an update that is skipped."""
    if not isinstance(optimizer, SGD):
        return

    chosen = set(parameters)
    for group in optimizer.param_groups:
        if not (group["fused"] and group["momentum"]):
            continue

        for parameter in filter(chosen.__contains__, group["params"]):
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def _check_can_unfreeze(run: Run) -> None:
    """Refuse settings under which ranks would wait for frozen parameters. DDP fixes at its first
    step which parameters have gradients (a static graph is refused with the option that allows
    others); captured steps are left out."""
    dist = run.config.dist
    if dist.mode != "ddp":
        return

    waits = run.world_size > 1 or run.config.train.exact == "elastic"
    if waits and not dist.find_unused_parameters:
        raise UsageError(
            "the ranks would wait for the gradients of frozen parameters",
            next_step="set --dist.find_unused_parameters, in the task's defaults for example",
        )


class LogSamples(Hook):
    """Logs what `Task.predict` makes of one fixed batch: after each evaluation or, if given, every
    so many steps.

    `show` turns the outputs into a value that `Run.log` takes, or into a list of such values; None:
    the outputs as they are. Every rank predicts, so `predict` may use collectives; rank 0's is
    logged. The random state is not changed."""

    def __init__(
        self,
        batch: Any,
        *,
        name: str = "samples",
        show: Callable[[Any], Any] | None = None,
        every_steps: int | None = None,
    ) -> None:
        self.every_steps = every_steps or sys.maxsize
        self._batch = batch
        self._name = name
        self._show = show

    def after_step(self, run: Run) -> None:
        self._log(run)

    def after_evaluation(self, run: Run) -> None:
        if self.every_steps == sys.maxsize:
            self._log(run)

    def _log(self, run: Run) -> None:
        """Predict, and log one value, or several as NAME/0, NAME/1, ..."""
        batch = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(run.device), self._batch)
        with (
            evaluation_mode(run.task, run.model),
            keeping_rng(run.device),
            torch.no_grad(),
            run._autocast,
        ):
            values = run.task.predict(run.model, run.task.on_device(batch))
            if self._show is not None:
                values = self._show(values)

        if not isinstance(values, list | tuple):
            run.log(self._name, values)
            return

        for number, value in enumerate(values):
            run.log(f"{self._name}/{number}", value)
