"""What a user writes to train a model: a `Task` with the model, its data and its loss. The engine
does the rest.

A task has no loop, no device and no rank. The engine asks it for model and data at the start of a
run, and for the loss of every batch after that. What a task does not define, the settings decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.base.errors import UsageError
from drumline.config.fields import name_in_task, task_fields
from drumline.config.schema import Config
from drumline.training.tasks.hook import Hook


@dataclass(frozen=True)
class Loss:
    """The loss of one batch, as sums, so that batches of any size on any rank add up to the right
    mean.

    Usually one line: `Loss(functional.cross_entropy(scores, labels, reduction="sum"))`.
    """

    total: Tensor
    """The sum of the loss over the batch, with its graph."""

    weight: Tensor | float | None = None
    """What the sum is divided by, over all ranks and micro-batches; None: the number of samples.
    For a loss per token, give the number of tokens."""

    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """More sums, divided by the same weight: the number of correct answers gives the accuracy."""

    outputs: Any = None
    """What the task's `metrics()` are updated with in an evaluation: `(scores, labels)`, or a
    mapping of keyword arguments. Training ignores it."""

    @classmethod
    def mean(
        cls,
        value: Tensor,
        count: Tensor | float,
        metrics: Mapping[str, Tensor] | None = None,
        outputs: Any = None,
    ) -> Self:
        """From means, of the loss and of the metrics, over `count` samples or tokens.

        `Loss.mean(functional.cross_entropy(scores, labels), len(labels))`
        """
        sums = {name: mean * count for name, mean in (metrics or {}).items()}
        return cls(value * count, weight=count, metrics=sums, outputs=outputs)

    def __post_init__(self) -> None:
        # Shapes and types are known on the host, so nothing here waits for the device.
        _check_is_sum(self.total, "total")
        if isinstance(self.weight, Tensor):
            _check_is_sum(self.weight, "weight")

        for name, value in self.metrics.items():
            _check_is_sum(value, f"metrics[{name!r}]")


class Metric(Protocol):
    """What an evaluation needs of a metric: torchmetrics' own names. Its metrics work as they
    are."""

    @property
    def metric_state(self) -> Mapping[str, Tensor | list[Tensor]]:
        """What the updates since the last reset have added up to."""

    def update(self, *outputs: Any, **named: Any) -> None:
        """Add a batch: `Loss.outputs`."""

    def merge_state(self, state: Any, /) -> None:
        """Add the `metric_state` of another rank."""

    def compute(self) -> Any:
        """A number, a tensor, or a dict of these. On rank 0 alone: no collectives."""

    def reset(self) -> None:
        """Begin a new evaluation."""


class Task:
    """A model, its data and its loss. Override `model`, `train_data` and `loss`; the rest has
    defaults.

    Attributes that your class declares with a type and a default are settings of the task: `width:
    int = 64` is `--task.width`, and `self.width` has its value. A docstring below one is its help.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default settings of this task: `{"train.epochs": 10, "optim.lr": 0.1}`. A config file and
    flags override them."""

    best_metric: ClassVar[str] = "loss"
    """The evaluation metric by which `checkpoint.keep_best` chooses."""

    higher_is_better: ClassVar[bool] = False
    """Whether the highest value is the best."""

    check_mean: ClassVar[bool] = True
    """Whether a `loss()` that looks like a mean is refused before the first step. False for a sum
    with a large term that does not depend on the batch."""

    collate: Callable[[Sequence[Any]], Any] | None = None
    """Makes a batch of samples (a static method); None: torch's default. Not used if the dataset
    makes batches."""

    _log: Callable[[str, Any], None] | None = None  # set while a hook runs

    training: bool = True
    """Whether `on_device` and `loss` are called for training; False in an evaluation and in
    `predict`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        if config.task:
            for name in map(name_in_task, task_fields(type(self), Task)):
                # not in a task that another one makes for itself
                if name in config.task:
                    setattr(self, name, config.task[name])

    def model(self) -> nn.Module:
        """A new network, on the CPU.

        Every rank calls this with the same random seed, so all start from the same weights. The
        engine moves it to its device and wraps it.
        """
        self._must_define("model", "return the torch.nn.Module to train")

    def train_data(self) -> Any:
        """All training samples: the engine splits them over the ranks, each exactly once an epoch.

        Any dataset with `__len__` and `__getitem__`, a `drumline.BatchDataset`, which makes whole
        batches, or a stream: anything with `__iter__`, such as a torch IterableDataset.
        """
        self._must_define("train_data", "return a dataset with __len__ and __getitem__")

    def eval_data(self) -> Any:
        """The samples for evaluation, or None to train without one. A mapping of names to datasets
        is several sets: their metrics are then called `NAME/loss` and so on, also in `best_metric`.
        """
        return None

    def on_device(self, batch: Any) -> Any:
        """The batch as `loss` gets it: what is to be done to a whole micro-batch on its device,
        such as augmentation (`if self.training:`) and normalisation.

        It is a part of the step, so it may be compiled and captured, and random numbers from
        torch's own generators are the same again after a resume.
        """
        return batch

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The loss of one batch, which is on the device: `Loss(sum over the batch)`.

        For training and evaluation. Call the `model` that is given: it is the one that is trained,
        `self.model()` is not. The engine also calls it a few times before the first step, to check
        it. Leave numbers on the device: `.item()` and `print` make every step wait for it.
        """
        self._must_define("loss", "return drumline.Loss(the sum of the loss over the batch)")

    def metrics(self) -> Mapping[str, Metric]:
        """Metrics of evaluations that are no sums, by name: torchmetrics' own, or any `Metric`.

        Each is updated with the `Loss.outputs` of every batch. A dict that it computes is reported
        as `NAME/KEY`.
        """
        return {}

    def num_tokens(self, batch: Any) -> int | None:
        """How many tokens the model computes for a micro-batch, padding included; None: its data is
        not tokens.

        For the tokens a second in the log; called for every micro-batch, so it must not wait for
        the device. By default: the size of `input_ids` in a batch by names.
        """
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        return tokens.numel() if isinstance(tokens, Tensor) else None

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """What the model predicts for a batch that is on the device and has been through
        `on_device`.

        By default: the model's output for the batch, or for the first part of a batch that is a
        tuple or a list.
        """
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        if not isinstance(inputs, Tensor):
            self._must_define(
                "predict", f"return what the model predicts for a {type(inputs).__name__}"
            )
        return model(inputs)

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        """Any torch optimizer over the parameters of `model`, which is on its device; None: that of
        the settings (`--optim.name`, `--optim.lr` and so on). Parameter groups may have rates of
        their own.
        """
        return None

    def schedule(self, step: int, total_steps: int) -> float | None:
        """What the rate of every parameter group is multiplied by in optimizer step `step`, counted
        from 0; None: `--optim.schedule`. The same answer for the same step, so that a resumed run
        continues as it was.
        """
        return None

    def report(self, means: dict[str, float]) -> dict[str, float]:
        """The numbers to log, from the mean loss and metrics; add derived values here."""
        return means

    def hooks(self) -> Sequence[Hook]:
        """What runs between the steps, in this order: `[drumline.EMA(0.999),
        drumline.EarlyStopping("loss")]`, and your own. Called once on every rank, when model and
        data are there."""
        return ()

    def log(self, name: str, value: Any) -> None:
        """Log a number, an image or text, as `Run.log` does; from the methods that your hooks
        call."""
        if self._log is None:
            raise UsageError(
                f"{type(self).__name__}.log() was called outside a hook",
                next_step="in loss() and on_device() give sums as Loss(metrics=...); call log() in a drumline.Hook",
            )

        self._log(name, value)

    def _must_define(self, method: str, job: str) -> NoReturn:
        """The error about a task without this method."""
        name = type(self).__name__
        raise UsageError(
            f"{name} does not define {method}()", next_step=f"add {method}() to {name}: {job}"
        )


def _check_is_sum(value: object, name: str) -> None:
    """Refuse a loss that has a value for each sample."""
    if not isinstance(value, Tensor):
        raise UsageError(
            f"Loss.{name} is a {type(value).__name__}, not a tensor",
            next_step="give the sum over the batch as a tensor on the device, without .item()",
        )

    if value.dim() != 0:
        raise UsageError(
            f"Loss.{name} has the shape {list(value.shape)}, but must be one number: the sum over the batch",
            next_step='use reduction="sum", or add .sum()',
        )


@contextmanager
def evaluation_mode(task: Task, model: nn.Module) -> Iterator[None]:
    """The task and its model as an evaluation has them; afterwards they are as they were."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    task.training = False

    try:
        yield
    finally:
        task.training = True
        # a user may keep parts of the model in eval mode
        for module, was_training in modes:
            module.training = was_training
