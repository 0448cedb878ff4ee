"""The built-in tasks and networks (GPT and MiniResNet), and the names that `drumline train TASK`,
`--data.name` and `--model.name` accept.

A class of the user's is named as `path/to/file.py:ClassName` or `package.module:ClassName`; a model
may be registered instead, with `@drumline.register_model("name")` in the task's file.
"""

from __future__ import annotations

import inspect
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar

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
from drumline.parallel.recompute import is_recomputed, recomputed
from drumline.training.tasks.base import Loss, Task

STD = 0.02
"""The standard deviation of initial weights."""

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


# Networks


class GPT(nn.Module):
    """`forward(tokens [N, T]) -> logits [N, T, vocab_size]`, for any T up to `context`."""

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float = 0.0,
        activation_checkpointing: bool | str = False,
    ) -> None:
        super().__init__()
        self.context = context
        self.activation_checkpointing = activation_checkpointing

        self.token_embedding = NormalEmbedding(vocab_size, width)
        self.position_embedding = NormalEmbedding(context, width)
        self.dropout = nn.Dropout(dropout)

        # 2 * layers branches add up on the residual path; this keeps its variance independent of
        # the depth.
        residual_std = STD / math.sqrt(2 * layers)

        self.blocks = nn.ModuleList(
            Block(width, heads=heads, dropout=dropout, residual_std=residual_std)
            for _ in range(layers)
        )

        self.norm = nn.LayerNorm(width, bias=False)
        for module in self.modules():
            if isinstance(module, NormalLinear | NormalEmbedding):
                module.init_weights()

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each."""
        # Shapes and types are known on the host, so the checks do not wait for the device.
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise UsageError(
                f"gpt takes integer tokens of shape [N, T], got {tokens.dtype} of {list(tokens.shape)}",
                next_step="check what a sample of the dataset looks like",
            )

        length = tokens.shape[1]
        if length > self.context:
            raise UsageError(
                f"a sample has {length} tokens, but the model's context is {self.context}",
                next_step=f"set --model.context to {length} or more, or make shorter samples",
            )

        hidden = self.dropout(
            self.token_embedding(tokens) + self.position_embedding.weight[:length]
        )

        policy = self.training and self.activation_checkpointing
        hidden = _apply_blocks(self.blocks, hidden, policy, draws_random=self.dropout.p > 0)

        # The output layer is the embedding itself: fewer parameters, and no tensor twice in the
        # state dict.
        return functional.linear(self.norm(hidden), self.token_embedding.weight)


class NormalLinear(nn.Linear):
    """A linear layer without a bias, whose weights begin with this standard deviation."""

    def __init__(self, in_features: int, out_features: int, *, std: float = STD) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.std = std

    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class NormalEmbedding(nn.Embedding):
    """An embedding whose weights begin as those of the linear layers."""

    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=STD)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to the residual path after its own norm."""

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        dropout: float,
        residual_std: float = STD,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = CausalAttention(
            width,
            heads=heads,
            dropout=dropout,
            residual_std=residual_std,
        )

        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = NormalLinear(width, 4 * width)
        self.mlp_out = NormalLinear(4 * width, width, std=residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Of hidden states [N, T, W], the same shape."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))

        # The tanh form, as in GPT-2; on a CPU it is also twice as fast.
        expanded = functional.gelu(self.mlp_in(self.mlp_norm(hidden)), approximate="tanh")
        outputs: Tensor = hidden + self.dropout(self.mlp_out(expanded))
        return outputs


class CausalAttention(nn.Module):
    """Each token attends to itself and to the tokens before it."""

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        dropout: float,
        residual_std: float,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout

        self.query_key_value = NormalLinear(width, 3 * width)
        self.out = NormalLinear(width, width, std=residual_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Of hidden states [N, T, W], the same shape."""
        batch, length, width = hidden.shape
        # [N, T, 3 W] -> three of [N, heads, T, W / heads]
        split = self.query_key_value(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()

        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )

        outputs: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return outputs


class MiniResNet(nn.Module):
    """`forward(images [N, C, H, W]) -> logits [N, num_classes]`, for images of any size."""

    def __init__(
        self,
        *,
        in_channels: int,
        num_classes: int,
        widths: Sequence[int] = (16, 32, 64),
        blocks: int = 1,
        dropout: float = 0.0,
        activation_checkpointing: bool | str = False,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.activation_checkpointing = activation_checkpointing

        self.stem = _convolution(in_channels, widths[0])
        self.stem_norm = nn.BatchNorm2d(widths[0])

        # With padding, stride 2 rounds up: one pixel stays one pixel.
        self.blocks = nn.ModuleList()
        channels = widths[0]
        for stage, width in enumerate(widths):
            for index in range(blocks):
                self.blocks.append(
                    BasicBlock(channels, width, stride=2 if stage > 0 and index == 0 else 1)
                )
                channels = width

        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], num_classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        # Shapes are known on the host, so the check does not wait for the device.
        if images.dim() != 4 or images.shape[1] != self.in_channels:
            raise UsageError(
                f"mini_resnet takes images of shape [N, {self.in_channels}, H, W], got {list(images.shape)}",
                next_step="check in_channels of the model and the shape of a sample of the dataset",
            )

        features = functional.relu(self.stem_norm(self.stem(images)))
        policy = self.training and self.activation_checkpointing
        features = _apply_blocks(self.blocks, features, policy, draws_random=False)
        logits: Tensor = self.head(self.dropout(features.mean(dim=(2, 3))))

        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape
    changes."""

    def __init__(self, in_channels: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.first = _convolution(in_channels, channels, stride=stride)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = _convolution(channels, channels)
        self.second_norm = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()

        if stride != 1 or in_channels != channels:
            projection = nn.Conv2d(in_channels, channels, kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.relu(self.first_norm(self.first(inputs)))
        hidden = self.second_norm(self.second(hidden))
        return functional.relu(hidden + self.shortcut(inputs))


def _apply_blocks(
    blocks: nn.ModuleList, hidden: Tensor, policy: bool | str, *, draws_random: bool
) -> Tensor:
    """One block after the other, those of the policy with activations that are computed again.
    `policy`: of `activation_checkpointing`, or False outside training."""
    for number, block in enumerate(blocks):
        if policy and is_recomputed(policy, number):
            hidden = recomputed(block, hidden, draws_random=draws_random)
        else:
            hidden = block(hidden)
    return hidden


def _convolution(in_channels: int, channels: int, *, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution that keeps the size, but for its stride."""
    # No bias: the BatchNorm that follows would cancel it.
    return nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)


def _initialise(module: nn.Module) -> None:
    """Initial weights of one module; called for all."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)
    elif isinstance(module, BasicBlock):
        # At the start each block is only its shortcut, so a deep network starts like a shallow one.
        nn.init.zeros_(module.second_norm.weight)


Builder = TypeVar("Builder", bound=Callable[..., nn.Module])

_builders: dict[str, Callable[..., nn.Module]] = {"gpt": GPT, "mini_resnet": MiniResNet}


def register_model(name: str) -> Callable[[Builder], Builder]:
    """Register a class or function that builds a model under a name, which `--model.name` then
    accepts:

        @register_model("my_net")
        def build(*, in_channels: int, num_classes: int, depth: int = 3) -> nn.Module: ...
    """

    def decorate(builder: Builder) -> Builder:
        if name in _builders:
            first = _builders[name]
            raise UsageError(
                f"two models are called {name!r}: {first.__module__}.{first.__qualname__} and "
                f"{builder.__module__}.{builder.__qualname__}",
                next_step="give one of them another name",
            )

        _builders[name] = builder
        return builder

    return decorate


def build_model(
    name: str,
    *,
    facts: Mapping[str, Any],
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
) -> nn.Module:
    """The model called `name`: `gpt`, `mini_resnet`, a registered one, or a class of the user's.

    It is given those `facts` of the data (channels, classes, vocabulary) and `settings` of the
    config that its signature names; a fact overrides a setting. It must accept all `options`, which
    override both."""
    builder = find_named("model", name, _builders)
    model = build_accepted(builder, {**settings, **facts}, options=options, what=f"model {name!r}")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model {name!r} is a {type(model).__name__}, not a torch.nn.Module",
            next_step="name a class that derives from torch.nn.Module",
        )

    return model


# Tasks


class ConfiguredTask(Task):
    """The dataset is `data.name`, the model is `model.name`, made to fit it."""

    def model(self) -> nn.Module:
        """The model of `model.name`, given what the training data is like."""
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
        """Read once, though the engine and the model both ask."""
        return self._build_data("train")

    def _build_data(self, split: Split) -> Any:
        return dataset_for(self.config, self.config.data.name, split)


class ImageClassification(ConfiguredTask):
    """Cross entropy and accuracy. A batch is (images, labels); the model gives a score per
    class."""

    best_metric = "accuracy"
    higher_is_better = True

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        """The sum of the cross entropy over the images, and how many are right."""
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
        """The sum over samples of the mean cross entropy of their tokens."""
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
        """For the speed in tokens."""
        return batch[0].numel()

    def report(self, means: dict[str, float]) -> dict[str, float]:
        """Adds the perplexity; infinite where it would be too large for a float."""
        loss = means["loss"]
        return {**means, "perplexity": math.inf if loss > 700 else math.exp(loss)}


class Synthetic(ConfiguredTask):
    """Image classification, or language modelling if `data.name` is `synthetic_tokens`, for trials
    of speed and of a cluster. The best checkpoint has the lowest loss."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        has_tokens = config.data.name == "synthetic_tokens"
        kind = LanguageModel if has_tokens else ImageClassification
        self._kind: ConfiguredTask = kind(config)

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
    """The dataset of that name, given those settings that it accepts. Others are left out: not
    every dataset has classes."""
    return build_accepted(
        find_named("dataset", name, DATASETS),
        settings,
        options={},
        what=f"the dataset {name}",
    )


# Their settings are in config/presets.py under the same names.
BUILT_IN: Mapping[str, type[Task]] = {
    "digits": ImageClassification,
    "cifar10": ImageClassification,
    "text": LanguageModel,
    "synthetic": Synthetic,
}


def load_task(spec: str) -> type[Task]:
    """The task class of a built-in name, `path/to/file.py:ClassName` or `package.module:ClassName`.
    The user's code is imported here."""
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
    """Refuse a class that cannot be made from the settings of a run, before one is made."""
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
    itself: `MyTask.training_step() is never called: ...`."""
    methods: dict[str, Any] = {}
    for task_class in reversed(task.__mro__):
        if issubclass(task_class, Task) and not task_class.__module__.startswith("drumline."):
            for name, value in vars(task_class).items():
                if callable(value) or isinstance(value, staticmethod | classmethod | property):
                    methods[name] = value

    names_in = {
        name: _names_in(method.__code__)
        for name, method in methods.items()
        if isinstance(method, FunctionType)
    }

    table = Path(__file__).with_name("uncalled_methods.toml").read_text(encoding="utf-8")
    instead_of = tomllib.loads(table)
    for name in methods:
        uses = [use for names, use in instead_of.items() if re.fullmatch(names, name)]
        is_called = any(name in names_in[caller] for caller in names_in if caller != name)
        if uses and not is_called:
            yield f"{task.__name__}.{name}() is never called: {uses[0]}"


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

    def is_unused(path: str) -> bool:
        """Whether the built-in parts alone would read this setting, and nobody has set it."""
        field = FIELDS[path]
        is_default = attrgetter(path)(config) == field.default and path not in task.defaults
        return field.scope.of_built_ins and is_default

    return frozenset(filter(is_unused, FIELDS))


def resolve_task(spec: str, task: type[Task], layers: Layers) -> Config:
    """Stage 2 of the settings: the config of a run of this task, with its defaults and its own
    fields."""
    defaults = PRESETS[spec].defaults if spec in PRESETS else task.defaults
    fields_of_task = {} if spec in PRESETS else task_fields(task, Task)
    return resolve(layers, defaults, task=task.__name__, task_fields=fields_of_task)
