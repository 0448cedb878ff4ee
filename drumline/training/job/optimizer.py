"""The optimizer that the settings name, or the task's own; what can be captured of its step; its
learning rates; and its steps, without those that `--train.on_nan` skips.

In a step, `LearningRates.set` comes first; then, per micro-batch, `FiniteSteps.spread` and `measure`;
at its end `FiniteSteps.check` and `take_optimizer_step`, which calls `optimizer.step`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Literal, assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from drumline.base.errors import UsageError
from drumline.base.text import join_names
from drumline.base.user_code import build_accepted, load_class
from drumline.checkpoint.finite import largest
from drumline.config.schema import OptimConfig
from drumline.metrics.meters import Meter
from drumline.parallel.shards import own_parts
from drumline.parallel.wrap import LiveBuffers
from drumline.rank.torch_internals import pytree
from drumline.training.tasks.base import Task
from drumline.training.tasks.ready_hooks import begin_momentum

NAMED = 5
# Those of torch that have a fused kernel on every device that we train on.
FUSED: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW)
GIVEN_ELSEWHERE = ("lr", "weight_decay")


def optimizer_of(
    task: Task, model: nn.Module, optim: OptimConfig, *, lr: float, is_sharded: bool = False
) -> Optimizer:
    """The task's own optimizer, or that of the settings, whose rate is `lr`. `is_sharded`: the
    parameters are, and some kernels do not take shards."""
    optimizer = task.optimizer(model)
    if optimizer is None:
        return make_optimizer(model, optim, lr=lr, is_sharded=is_sharded)

    check_own_optimizer(optimizer, model, maker=f"{type(task).__name__}.optimizer()")
    return optimizer


def make_optimizer(
    model: nn.Module, optim: OptimConfig, *, lr: float, is_sharded: bool = False
) -> Optimizer:
    """The optimizer of the settings over the trained parameters, fused if the device has such a
    kernel. What it refuses of the settings is an error of the user's."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UsageError(f"{type(model).__name__} has no trainable parameter")

    options = {name: _parsed(value) for name, value in optim.options.items()}
    for name in GIVEN_ELSEWHERE:
        if name in options:
            raise UsageError(
                f"--optim.options.{name} is not an option", next_step=f"give it as --optim.{name}"
            )

    try:
        if optim.name == "muon":
            return _make_muon(model, trained, optim, lr, options)

        return _make_named(trained, optim, lr, options, is_sharded=is_sharded)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the optimizer {optim.name} does not accept its settings: {error}",
            next_step="check --optim.options and the other settings of the optimizer",
        ) from error


def _make_named(
    trained: list[nn.Parameter],
    optim: OptimConfig,
    lr: float,
    options: Mapping[str, Any],
    *,
    is_sharded: bool,
) -> Optimizer:
    """Any optimizer but Muon."""
    kind = optimizer_class(optim.name)
    settings: dict[str, Any] = {"params": [{"params": trained}], "lr": lr}
    if "weight_decay" in inspect.signature(kind).parameters:
        settings["params"] = decayed_groups(trained, optim.weight_decay)

    if optim.name == "sgd":
        settings["momentum"] = optim.momentum
        settings["nesterov"] = optim.nesterov and optim.momentum > 0
    elif optim.name == "adamw":
        settings["betas"] = optim.betas
        settings["eps"] = optim.eps

    if kind in FUSED:
        # torch has no fused SGD for shards
        is_supported = not (kind is SGD and is_sharded)
        settings["fused"] = is_supported and all(map(_has_fused_kernel, trained))

    optimizer = build_accepted(kind, settings, options=options, what=f"the optimizer {optim.name}")
    check_steps(optimizer)

    return optimizer


def _has_fused_kernel(parameter: nn.Parameter) -> bool:
    """Whether torch's fused optimizers can update this parameter."""
    return parameter.device.type in ("cuda", "cpu") and parameter.is_floating_point()


class MuonAndAdamW(Optimizer):
    """`--optim.name muon`: one optimizer over the groups and the state of two, which take a step
    each: to checkpoints and schedules it is one."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self._optimizers = optimizers
        self._num_groups = [len(optimizer.param_groups) for optimizer in optimizers]
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Both steps. Groups and state are passed on each time, because `load_state_dict` replaces
        them."""
        loss = None if closure is None else closure()
        groups = iter(self.param_groups)
        for optimizer, count in zip(self._optimizers, self._num_groups, strict=True):
            optimizer.state = self.state
            optimizer.param_groups = list(islice(groups, count))
            optimizer.step()

        return loss


MuonAndAdamW.__name__ = "muon"  # messages and checkpoints name it as the user does


def _make_muon(
    model: nn.Module,
    trained: list[nn.Parameter],
    optim: OptimConfig,
    lr: float,
    options: Any,
) -> Optimizer:
    """Muon for matrices but for embeddings, as torch documents it, and AdamW for the rest.
    `match_rms_adamw` makes Muon's updates as large as AdamW's, so one rate and one decay fit
    both."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }

    matrices = []
    remaining = []
    for parameter in trained:
        if parameter.ndim == 2 and id(parameter) not in embeddings:
            matrices.append(parameter)
        else:
            remaining.append(parameter)

    pool = {
        "params": matrices,
        "lr": lr,
        "weight_decay": optim.weight_decay,
        "adjust_lr_fn": "match_rms_adamw",
    }

    muon = build_accepted(Muon, pool, options=options, what="the optimizer muon")
    if not remaining:
        return MuonAndAdamW(muon)

    groups = decayed_groups(remaining, optim.weight_decay)
    return MuonAndAdamW(muon, AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps))


def optimizer_class(name: str) -> type[Optimizer]:
    """`sgd`, `adamw`, or a class by its dotted name (`torch.optim.NAdam`) or as `file.py:Class`."""
    built_in: dict[str, type[Optimizer]] = {"sgd": SGD, "adamw": AdamW}
    if name in built_in:
        return built_in[name]

    module, _, last = name.rpartition(".")
    kind = load_class(name if ":" in name else f"{module}:{last}")
    if not issubclass(kind, Optimizer):
        raise UsageError(
            f"{name} is not a torch optimizer", next_step="name a subclass of torch.optim.Optimizer"
        )

    return kind


def decayed_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups at most. Biases and normalization scales have one dimension; they are not decayed.

    [{"params": [matrices], "weight_decay": 0.01}, {"params": [biases, scales], "weight_decay": 0.0}]
    """
    decayed: dict[str, Any] = {"params": [], "weight_decay": weight_decay}
    undecayed: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for parameter in parameters:
        group = decayed if parameter.ndim > 1 else undecayed
        group["params"].append(parameter)

    return [group for group in (decayed, undecayed) if group["params"]]


def _parsed(value: Any) -> Any:
    """An option as torch takes it: `0.9,0.99` is a tuple of numbers."""
    if not isinstance(value, str) or "," not in value:
        return value

    try:
        return tuple(map(float, value.split(",")))
    except ValueError:
        return value


def check_steps(optimizer: Optimizer) -> None:
    """Refuse an optimizer that the engine cannot use: it has to take a step without a closure, and
    at the rate of the schedule."""
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{name}.step() needs a closure that computes the loss again, and an engine step computes it once",
            next_step="use an optimizer without one, or a loop of your own (docs/own-loop.md)",
        )

    if any("lr" not in group for group in optimizer.param_groups):
        raise UsageError(
            f"{name} has a parameter group without lr, which the schedule sets",
            next_step="give every group an lr; schedule() may return 1.0",
        )


def check_own_optimizer(optimizer: Optimizer, model: nn.Module, *, maker: str) -> None:
    """Refuse what a task's own `optimizer(model)` returned, if it does not train the whole model.
    `maker`: its name for messages."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"{maker} returned a {type(optimizer).__name__}, not a torch.optim.Optimizer",
            next_step="return one optimizer over all trained parameters; parameter groups may have rates of their own",
        )

    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held - set(map(id, model.parameters())):
        raise UsageError(
            f"{maker} holds a parameter that the model does not have",
            next_step="build it from the model that is given, not from self.model(), which makes another one",
        )

    left_out = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in held
    ]

    if left_out:
        raise UsageError(
            f"{maker} leaves out parameters that get gradients: {join_names(left_out, most=NAMED)}",
            next_step="add them to a group, or freeze them in model() with requires_grad=False",
        )

    check_steps(optimizer)


def find_uncapturable(optimizer: Optimizer, on_nan: str) -> str | None:
    """Why the optimizer's step cannot be captured in a CUDA graph, as the end of a sentence; None:
    it can. A graph cannot read a number of the host that changes."""
    groups = optimizer.param_groups
    name = type(optimizer).__name__
    if on_nan == "skip" and not leaves_out_itself(optimizer):
        return f"{name} is not fused, so --train.on_nan skip waits for the device in every step"

    if isinstance(optimizer, SGD):
        is_fused = all(group["fused"] for group in groups)
        return None if is_fused else f"{name} reads its rate on the host unless it is fused"

    is_capturable = all("capturable" in group for group in groups)
    return None if is_capturable else f"{name} reads its rate on the host"


def set_capturable(optimizer: Optimizer, built: list[dict[str, Any]], *, is_on: bool) -> None:
    """Let the optimizer's step be captured: its rates and counts of steps move to the device, where
    torch rounds differently. Or undo it, with the `group_settings` that it was built with."""
    for group, settings in zip(optimizer.param_groups, built, strict=True):
        device = next((parameter.device for parameter in group["params"]), None)
        if is_on:
            group["lr"] = torch.as_tensor(group["lr"], device=device)
        else:
            group["lr"] = float(group["lr"])

        if "capturable" in settings:
            group["capturable"] = is_on or settings["capturable"]

        is_on_device = group.get("capturable") or group.get("fused")
        _move_counts(optimizer, group, device if is_on_device else "cpu")


def _move_counts(
    optimizer: Optimizer, group: Mapping[str, Any], device: torch.device | str | None
) -> None:
    """Move what torch keeps on the host for a step that is not captured, such as the count of
    steps."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        for name in ("step", "mu_product"):
            if isinstance(state.get(name), Tensor):
                state[name] = state[name].to(device)


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of what each parameter group holds beside its parameters and its rate, which is set
    before each step: `{"betas": (0.9, 0.999), "weight_decay": 0.01, "fused": True, ...}`."""
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
    return copy.deepcopy(settings)


def group_state(optimizer: Optimizer, built: list[dict[str, Any]]) -> list[list[str]]:
    """By group: the settings that the optimizer has changed itself since it was built, as
    schedule-free ones and Prodigy do. They are state: a resumed run takes them from the checkpoint.
    Tensors always count, since comparing them would wait for the device.

        [["k", "lr_max", "weight_sum"], ["k", "lr_max", "weight_sum"]]
    """
    names_by_group = []
    for group, settings in zip(optimizer.param_groups, built, strict=True):
        names = [
            name
            for name, before in settings.items()
            if name in group and _is_state(group[name], before)
        ]
        names_by_group.append(names)

    return names_by_group


def _is_state(value: Any, before: Any) -> bool:
    """Whether the optimizer has changed a setting, or may have: it has a tensor in it."""
    has_tensor = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
    return has_tensor or bool(value != before)


def leaves_out_itself(optimizer: Optimizer) -> bool:
    """Whether the optimizer itself skips an update if `found_inf` is set, as torch's fused
    optimizers do for a loss scaler. torch has no public name for it."""
    is_fused = all(group.get("fused", True) for group in optimizer.param_groups)
    return is_fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class LearningRates:
    """Sets the rates of a step: each parameter group's own, times a factor that depends only on the
    step. So a resumed run needs no state of a schedule."""

    def __init__(
        self,
        optimizer: Optimizer,
        optim: OptimConfig,
        schedule: Callable[[int, int], float | None],
    ) -> None:
        """`schedule(step, total_steps)`: the task's own factor; if it is None, the settings
        decide."""
        self._optimizer = optimizer
        self._optim = optim
        self._schedule = schedule
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self.peak = max(self._peaks)
        """The highest rate of a group."""

        self.num_rates = len(set(self._peaks))
        """How many different peaks the groups have."""

        self._highest_group = self._peaks.index(self.peak)
        """Whose rate is logged."""

    def highest(self) -> float:
        """The rate of the latest step, of the group whose peak is the highest. Waits for a rate on
        the device."""
        return float(self._optimizer.param_groups[self._highest_group]["lr"])

    def set(self, step: int, total_steps: int) -> None:
        """Before optimizer step `step`, counted from 0. A rate on the device is overwritten there,
        without waiting."""
        factor = self.factor(step, total_steps)

        # Looked up each time: loading a state replaces the groups.
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor

    def factor(self, step: int, total_steps: int) -> float:
        """What every group's peak is multiplied by in that step."""
        factor = self._schedule(step, total_steps)
        if factor is None:
            return rate_factor(self._optim, step, total_steps=total_steps)

        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise UsageError(
                f"schedule({step}, {total_steps}) returned {factor!r}, not a factor of 0 or more",
                next_step="return a number that every group's lr is multiplied by, or None for --optim.schedule",
            )

        return float(factor)


def peak_rate(optim: OptimConfig, *, world_size: int) -> float:
    """The highest rate of the run: `optim.lr`, scaled by the number of ranks if the global batch
    was. With 0.1 on 4 ranks: 0.4 (`linear`) or 0.2 (`sqrt`)."""
    scale = {"none": 1.0, "linear": world_size, "sqrt": math.sqrt(world_size)}
    return optim.lr * scale[optim.scale_lr]


def rate_factor(optim: OptimConfig, step: int, *, total_steps: int) -> float:
    """The fraction of the peak rate in optimizer step `step`, counted from 0: it rises over the
    warm-up steps, then follows the schedule."""
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps

    after = step - optim.warmup_steps
    done = min(1.0, after / max(1, total_steps - optim.warmup_steps))
    match optim.schedule:
        case "constant":
            return 1.0
        case "step":
            return float(optim.step_factor ** (after // optim.step_every))
        case "linear":
            falling = 1.0 - done
        case "cosine":
            falling = 0.5 * (1.0 + math.cos(math.pi * done))
        case _:
            assert_never(optim.schedule)

    return optim.final_lr_ratio + (1.0 - optim.final_lr_ratio) * falling


# Its steps


class FiniteSteps:
    """Counts non-finite steps on the device, so that no step waits, and a captured step counts too.
    A job has one, for all kinds of steps. `--train.on_nan` decides what is counted, and what
    happens to the update:

    - `stop`, `warn`: a step whose loss is NaN or infinite. `stop` also freezes the weights of this
      rank from that step on: the loop reads the count some steps later, and can still run the batch
      again with these weights. On a GPU this needs a fused optimizer; with any other it would wait
      for the device.
    - `skip`: a step with a non-finite loss or gradient on any rank. Gradients are reduced before
      they are checked, so all ranks skip the same updates, and undo what the step did to buffers
      and to the logged sums.

    With fp16 the loss scaler itself skips updates with an infinite gradient. Then only the loss is
    checked, only the rank that computed it undoes its logged sums, and `stop` freezes nothing."""

    def __init__(
        self,
        on_nan: Literal["stop", "skip", "warn"],
        meter: Meter,
        buffers: LiveBuffers,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        *,
        waits_for_device: bool,
        is_sharded: bool = False,
    ) -> None:
        """`waits_for_device`: whether reading a number waits for the device. `is_sharded`: ranks
        hold different shards, so all of them must skip the same updates."""
        self.skips = on_nan == "skip"
        self.counts = torch.zeros(2, dtype=meter.dtype, device=meter.loss.device)
        """Since the last reset: the number of non-finite steps, and of steps since the first of
        them."""

        self._num_bad, self._num_since = self.counts.unbind()
        self._bad = torch.zeros((), device=meter.loss.device)
        """1 if the latest step was not finite."""

        self._meter = meter
        self._buffers = buffers
        self._optimizer = optimizer
        self._scaler = scaler
        self._kept_buffers: list[Tensor] | None = None
        self._kept_sums: Tensor | None = None

        leaves_out = {"stop": True, "skip": True, "warn": False}[on_nan]
        decides = leaves_out and scaler is None
        self._is_sharded = is_sharded
        self._agrees = decides and is_sharded
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        # An optimizer on the host would have to wait for the number, which is on the device.
        is_here = all(p.device == self._bad.device for p in parameters)
        is_fused = waits_for_device and is_here and leaves_out_itself(optimizer)

        # `skip` waits if there is no other way: it must not apply the update.
        may_wait = self.skips or not waits_for_device
        self._decides_here = decides and not is_fused and may_wait
        if decides and is_fused:
            optimizer.found_inf = self._bad  # type: ignore[attr-defined]  # read by torch's fused optimizers

        self.keeps_weights = scaler is not None or self._decides_here or (decides and is_fused)
        """Whether the weights stay finite after a non-finite loss."""

        if self.skips or scaler is not None:
            begin_momentum(optimizer, parameters)

    grad_norm: Tensor | None = None
    """Of the latest step, before clipping; on the device. None: gradients are not clipped."""

    agree: Callable[[], object] | None = None
    """Collective, before an update: whether all ranks have their gradients, where others may
    continue without one."""

    def begin(self) -> None:
        """A step begins: keep what it may have to take back."""
        if self.skips:
            self._kept_buffers = self._buffers.keep(self._kept_buffers)
            self._kept_sums = None

    def measure(self, total: Tensor, weight: Tensor | float, metrics: Mapping[str, Tensor]) -> None:
        """Add a micro-batch to the logged sums. With `skip` everything is on the device, where it
        can be undone."""
        if self.skips:
            if self._kept_sums is None:
                self._meter.prepare(metrics)
                self._kept_sums = self._meter.keep()

            if not isinstance(weight, Tensor):
                weight = torch.full((), weight, dtype=self.counts.dtype, device=self.counts.device)

        self._meter.add(total, weight, metrics)

    def spread(self, scaled: Tensor, total: Tensor) -> Tensor:
        """The loss to differentiate. With `skip` a non-finite loss makes all gradients NaN, which
        every rank sees."""
        return scaled * (1.0 + total.detach() * 0.0) if self.skips else scaled

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Count the step if its loss or gradients are not finite, without waiting for the
        device."""
        if not self.skips or self._scaler is not None:
            number = self._meter.loss
        elif self.grad_norm is not None:
            number = self.grad_norm
        else:
            gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
            here = own_parts(gradients) if self._is_sharded else gradients
            number = largest(here).to(self._bad.device)

        # 1 if the number is not finite, otherwise 0: two operations; torch.isfinite needs four.
        torch.ne(number - number, 0, out=self._bad)
        bad_here = self._bad
        if self._agrees:
            bad_here = self._bad.clone()
            dist.all_reduce(self._bad, op=dist.ReduceOp.MAX)

        if self.skips:
            self._num_bad.add_(self._bad)
            self._num_since.add_(self._num_bad.sign())
        else:  # the sum since the last log line stays non-finite
            self.counts.add_(bad_here)

    def take_optimizer_step(self) -> None:
        """The optimizer's step, unless it is skipped. On a GPU fused optimizers skip it
        themselves."""
        if self.agree is not None:
            self.agree()

        if self._scaler is not None:
            skipped = self._left_out_by(self._scaler) if self.skips else None
            self._scaler.step(self._optimizer)
            self._scaler.update()
        else:
            skipped = self._bad if self.skips else None
            if not (self._decides_here and self._bad):
                self._optimizer.step()

        if skipped is not None:
            self._take_back_if(skipped > 0)
            if self._kept_sums is not None:
                self._meter.put_back_if(self._bad > 0, self._kept_sums)

    def _left_out_by(self, scaler: GradScaler) -> Tensor:
        """Whether the scaler will skip this update. torch has no public name for it."""
        if not scaler._per_optimizer_states[id(self._optimizer)]["found_inf_per_device"]:
            scaler.unscale_(self._optimizer)

        infs_by_device = scaler._found_inf_per_device(self._optimizer).values()
        return torch.stack([inf.to(self._bad.device) for inf in infs_by_device]).sum()

    @torch.no_grad()
    def _take_back_if(self, is_skipped: Tensor) -> None:
        """Undo what the step did to buffers, without waiting for the device. A buffer whose shape
        has changed is a cache, and stays."""
        pairs = zip(self._kept_buffers or [], self._buffers.now(), strict=True)
        chosen = [
            torch.where(is_skipped, before, now) if before.shape == now.shape else before
            for before, now in pairs
        ]

        self._buffers.put_back(chosen)
