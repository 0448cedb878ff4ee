"""The built-in tasks, and the names that `drumline train TASK` and `--data.name` accept.

A class of the user's is named as `path/to/file.py:ClassName` or `package.module:ClassName`.
"""

from __future__ import annotations

import inspect
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from drumline.base.errors import UsageError
from drumline.base.startup import use_private_cache
from drumline.base.user_code import build_accepted, find_named
from drumline.config import PRESETS, Layers, resolve
from drumline.config.fields import FIELDS, task_fields
from drumline.config.schema import Config
from drumline.data.cifar10 import cifar10
from drumline.data.dataset import Split
from drumline.data.images import ImageFolder, digits
from drumline.data.synthetic import SyntheticImages, SyntheticTokens
from drumline.data.tokens import tokens
from drumline.training.models import build_model
from drumline.training.tasks.base import Loss, Task

# Attributes of a dataset that its model needs.
_FACTS = ("in_channels", "num_classes", "vocab_size")
DATASETS: dict[str, Callable[..., Any]] = {
    "digits": digits,
    "cifar10": cifar10,
    "image_folder": ImageFolder,
    "tokens": tokens,
    "synthetic_images": SyntheticImages,
    "synthetic_tokens": SyntheticTokens,
}


class ConfiguredTask(Task):
    """The dataset is `data.name`, the model is `model.name`, made to fit it."""

    def model(self) -> nn.Module:
        settings = dict(vars(self.config.model))
        name = settings.pop("name")
        options = settings.pop("options")
        del settings["init"], settings["init_strict"]  # the engine's
        data = self.train_data()
        facts = {fact: getattr(data, fact) for fact in _FACTS if hasattr(data, fact)}
        return build_model(name, facts=facts, settings=settings, options=options)

    def train_data(self) -> Any:
        return self._train_data

    def eval_data(self) -> Any:
        return self._build_data("eval")

    @cached_property
    def _train_data(self) -> Any:
        # Read once, though the engine and the model both ask.
        return self._build_data("train")

    def _build_data(self, split: Split) -> Any:
        return dataset_for(self.config, self.config.data.name, split)


class ImageClassification(ConfiguredTask):
    """Cross entropy and accuracy. A batch is (images, labels); the model gives a score per
    class."""

    best_metric = "accuracy"
    higher_is_better = True

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        images, labels = batch
        scores = model(images)
        if scores.dim() != 2:
            raise UsageError(
                f"the model returned scores of shape {list(scores.shape)}; image classification needs [N, classes]",
                next_step="check --model.name; a language model goes with the task `text`",
            )
        return Loss(
            functional.cross_entropy(scores, labels, reduction="sum"),
            metrics={"accuracy": (scores.argmax(dim=1) == labels).sum()},
        )


class LanguageModel(ConfiguredTask):
    """Cross entropy per token, and perplexity. A batch is (tokens, the token that follows each)."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        tokens, following = batch
        scores = model(tokens)
        if scores.dim() != 3:
            raise UsageError(
                f"the model returned scores of shape {list(scores.shape)}; a language model needs [N, T, vocabulary]",
                next_step="check --model.name; an image model goes with a task such as `digits`",
            )
        # Every sample has the same number of tokens, so a sample's loss is the mean over its tokens
        # and all samples weigh the same: without a weight there is no collective in every step to
        # add weights up over the ranks.
        total = functional.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="sum")
        return Loss(total / following.shape[1])

    def num_tokens(self, batch: tuple[Tensor, Tensor]) -> int:
        return batch[0].numel()

    def report(self, means: dict[str, float]) -> dict[str, float]:
        loss = means["loss"]
        return {**means, "perplexity": math.inf if loss > 700 else math.exp(loss)}


class Synthetic(ConfiguredTask):
    """Image classification, or language modelling if `data.name` is `synthetic_tokens`, for trials
    of speed and of a cluster. The best checkpoint has the lowest loss."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        has_tokens = config.data.name == "synthetic_tokens"
        self._kind: ConfiguredTask = (
            LanguageModel(config) if has_tokens else ImageClassification(config)
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self._kind.loss(model, batch)

    def num_tokens(self, batch: Any) -> int | None:
        return self._kind.num_tokens(batch)

    def report(self, means: dict[str, float]) -> dict[str, float]:
        return self._kind.report(means)


def dataset_for(config: Config, name: str, split: Split) -> Any:
    """The dataset of that name, with the settings of a run."""
    data = config.data
    return build_dataset(
        name,
        split=split,
        dir=data.dir,
        augment=data.augment,
        image_size=data.image_size,
        samples=data.samples,
        classes=data.classes,
        token_type=data.token_type,
        context=config.model.context,
        seed=config.train.seed,
    )


def build_dataset(name: str, **settings: Any) -> Any:
    """The dataset of that name, given those settings that it accepts."""
    return build_accepted(
        find_named("dataset", name, DATASETS), settings, options={}, what=f"the dataset {name}"
    )


# Their settings are in config/presets.py under the same names.
BUILT_IN: Mapping[str, type[Task]] = {
    "digits": ImageClassification,
    "cifar10": ImageClassification,
    "text": LanguageModel,
    "synthetic": Synthetic,
}


def load_task(spec: str) -> type[Task]:
    """The task class of a built-in name, `path/to/file.py:ClassName` or
    `package.module:ClassName`."""
    # the user's imports may load torch's compiler, which chooses its cache then
    use_private_cache()
    task: type[Any] = find_named("task", spec, BUILT_IN)
    if not issubclass(task, Task):
        raise UsageError(
            f"{spec} is not a Task", next_step=f"write `class {task.__name__}(drumline.Task)`"
        )
    check_constructor(task)
    return task


def check_constructor(task: type[Task]) -> None:
    """Refuse a class that cannot be made from the settings of a run."""
    try:
        inspect.signature(task).bind(Config())
    except TypeError:
        name = task.__name__
        raise UsageError(
            f"{name}.__init__{inspect.signature(task.__init__)} cannot be called as {name}(config), which is how "
            "Drumline makes a task",
            next_step="write `def __init__(self, config):` with `super().__init__(config)` as its first line, or leave "
            "__init__ out",
        ) from None


def uncalled_methods(task: type[Task]) -> Iterator[str]:
    """A message for each method that looks like another library's and that the task does not call
    itself."""
    methods = {
        name: value
        for task_class in reversed(task.__mro__)
        if issubclass(task_class, Task) and not task_class.__module__.startswith("drumline.")
        for name, value in vars(task_class).items()
        if callable(value) or isinstance(value, staticmethod | classmethod | property)
    }
    table = Path(__file__).with_name("uncalled_methods.toml").read_text(encoding="utf-8")
    instead_of = tomllib.loads(table)
    for name in methods:
        instead = next(
            (use for names, use in instead_of.items() if re.fullmatch(names, name)), None
        )
        functions = [
            method
            for method_name, method in methods.items()
            if method_name != name and isinstance(method, FunctionType)
        ]
        if instead is not None and not any(
            name in _names_in(function.__code__) for function in functions
        ):
            yield f"{task.__name__}.{name}() is never called: {instead}"


def _names_in(code: CodeType) -> set[str]:
    """Every name that a function uses, including functions inside it."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def unused_settings(task: type[Task], config: Config) -> frozenset[str]:
    """The settings of built-in models and datasets that mean nothing to a task with its own:
    neither the user nor the task has set them. A task that inherits from a built-in one may still
    build on its model and data."""
    if issubclass(task, ConfiguredTask):
        return frozenset()
    return frozenset(
        path
        for path, field in FIELDS.items()
        if field.scope.of_built_ins
        and attrgetter(path)(config) == field.default
        and path not in task.defaults
    )


def resolve_task(spec: str, task: type[Task], layers: Layers) -> Config:
    """Stage 2 of the settings: the config of a run of this task."""
    defaults = PRESETS[spec].defaults if spec in PRESETS else task.defaults
    fields_of_task = {} if spec in PRESETS else task_fields(task, Task)
    return resolve(layers, defaults, task=task.__name__, task_fields=fields_of_task)
