"""What a user writes to train a model: a `Task` with the model, its data and its loss. The engine does the rest.

A task has no loop, no device, no rank and no optimizer. The engine asks it for model and data at the start of a run,
and for the loss of every batch after that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, ClassVar, NoReturn, Self

from torch import Tensor, nn

from drumline.config.schema import Config
from drumline.errors import UsageError


@dataclass(frozen=True)
class Loss:
    """The loss of one batch, as sums, so that batches of any size on any rank add up to the right mean.

    Usually one line: `Loss(functional.cross_entropy(scores, labels, reduction="sum"))`.
    """

    total: Tensor
    """The sum of the loss over the batch, with its graph."""
    weight: Tensor | float | None = None
    """What the sum is divided by, over all ranks and micro-batches; None: the number of samples. For a loss per token,
    give the number of tokens."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """More sums, divided by the same weight: the number of correct answers gives the accuracy."""

    @classmethod
    def mean(cls, value: Tensor, count: Tensor | float, metrics: Mapping[str, Tensor] | None = None) -> Self:
        """From means, of the loss and of the metrics, over `count` samples or tokens.

        `Loss.mean(functional.cross_entropy(scores, labels), len(labels))`
        """
        sums = {name: one * count for name, one in (metrics or {}).items()}
        return cls(value * count, weight=count, metrics=sums)

    def __post_init__(self) -> None:
        # Shapes and types are known on the host, so nothing here waits for the device.
        _check_is_sum(self.total, "total")
        if isinstance(self.weight, Tensor):
            _check_is_sum(self.weight, "weight")
        for name, value in self.metrics.items():
            _check_is_sum(value, f"metrics[{name!r}]")


class Task:
    """A model, its data and its loss. Override `model`, `train_data` and `loss`; the rest has defaults."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default settings of this task: `{"train.epochs": 10, "optim.lr": 0.1}`. A config file and flags override them."""
    best_metric: ClassVar[str] = "loss"
    """The evaluation metric by which `checkpoint.keep_best` chooses."""
    higher_is_better: ClassVar[bool] = False
    """Whether the highest value is the best."""
    check_mean: ClassVar[bool] = True
    """Whether a `loss()` that looks like a mean is refused before the first step. False for a sum with a large term
    that does not depend on the batch."""
    collate: Callable[[Sequence[Any]], Any] | None = None
    """Makes a batch of samples (a static method); None: torch's default. Not used if the dataset makes batches."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def model(self) -> nn.Module:
        """A new network, on the CPU.

        Every rank calls this with the same random seed, so all start from the same weights. The engine moves it
        to its device and wraps it.
        """
        self._must_define("model", "return the torch.nn.Module to train")

    def train_data(self) -> Any:
        """All training samples: the engine splits them over the ranks, each exactly once an epoch.

        Any dataset with `__len__` and `__getitem__`, a `drumline.BatchDataset`, which makes whole batches, or a stream:
        anything with `__iter__`, such as a torch IterableDataset.
        """
        self._must_define("train_data", "return a dataset with __len__ and __getitem__")

    def eval_data(self) -> Any:
        """The samples for evaluation, or None to train without one."""
        return None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The loss of one batch, which is on the device: `Loss(sum over the batch)`.

        For training and evaluation. Call the `model` that is given: it is the one that is trained, `self.model()` is
        not. The engine also calls it a few times before the first step, to check it. Leave numbers on the device:
        `.item()` and `print` make every step wait for it.
        """
        self._must_define("loss", "return drumline.Loss(the sum of the loss over the batch)")

    def report(self, means: dict[str, float]) -> dict[str, float]:
        """The numbers to log, from the mean loss and metrics; add derived values here."""
        return means

    def _must_define(self, method: str, job: str) -> NoReturn:
        name = type(self).__name__
        raise UsageError(f"{name} does not define {method}()", next_step=f"add {method}() to {name}: {job}")


def _check_is_sum(value: object, name: str) -> None:
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


_OPTIM = "the settings choose it: --optim.name, --optim.lr, --optim.schedule and the others of --help"
_LOSS = "write loss(model, batch), which training and evaluation both call"
_LOOP = "to write the loop yourself, use DDPManager (docs/own-loop.md)"
_INSTEAD = {
    r"configure_optimizers|create_optimizer\w*|create_scheduler|optimizer_step|lr_scheduler_step": _OPTIM,
    r"(training|train|validation|val|test|eval)_step(_end)?|compute_loss|forward": _LOSS,
    r"predict_step": "load the model into a script with drumline.load_checkpoint",
    r"(get_)?train_dataloader": "write train_data(), which returns the dataset; --train.batch_size makes batches",
    r"(get_)?(val|validation|test|eval)_dataloader": "write eval_data(), which returns the dataset",
    r"prepare_data|configure_model": "write train_data(), eval_data() and model(); every rank calls them",
    r"compute_metrics|(training|validation|test)_epoch_end": "give sums as Loss(metrics=...), or write report(means)",
    r"on_[a-z]\w*": f"there are no such hooks: report(means) has the numbers of each log line and evaluation; {_LOOP}",
    r"backward|configure_gradient_clipping|configure_callbacks|fit": _LOOP,
}


def uncalled_methods(task: type[Task]) -> Iterator[str]:
    """A message for each method that looks like another library's and that the task does not call itself."""
    methods = {
        name: value
        for one in reversed(task.__mro__)
        if issubclass(one, Task) and not one.__module__.startswith("drumline.")
        for name, value in vars(one).items()
        if callable(value) or isinstance(value, staticmethod | classmethod | property)
    }
    for name in methods:
        instead = next((use for names, use in _INSTEAD.items() if re.fullmatch(names, name)), None)
        functions = [one for other, one in methods.items() if other != name and isinstance(one, FunctionType)]
        if instead is not None and not any(name in _names_in(one.__code__) for one in functions):
            yield f"{task.__name__}.{name}() is never called: {instead}"


def _names_in(code: CodeType) -> set[str]:
    """Every name that a function uses, including functions inside it."""
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)
