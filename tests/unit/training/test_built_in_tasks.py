"""The built-in tasks: their losses are exact sums, and each preset's model and data fit
together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.base.errors import UsageError
from drumline.config import PRESETS
from drumline.config.schema import Config, DataConfig, ModelConfig
from drumline.training.tasks import ImageClassification, LanguageModel
from drumline.training.tasks.built_in import GPT, MiniResNet, Synthetic, load_task

SMALL_GPT = ModelConfig(name="gpt", layers=1, heads=2, width=16, context=12)
IMAGES = Config(data=DataConfig(name="synthetic_images", image_size=8, samples=40, classes=3))
TOKENS = Config(model=SMALL_GPT, data=DataConfig(name="synthetic_tokens", samples=40))


def first_batch(data: Any, size: int = 6) -> tuple[Tensor, Tensor]:
    inputs, targets = data.batch(np.arange(size), None)
    return inputs, targets


class NoReading(TorchDispatchMode):
    """Fails when a number is read from the device."""

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        assert operation is not torch.ops.aten._local_scalar_dense.default
        return operation(*arguments, **(keywords or {}))


def test_classification_sums_cross_entropy_and_correct_answers() -> None:
    scores = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], requires_grad=True)
    labels = torch.tensor([0, 1, 1])

    loss = ImageClassification(IMAGES).loss(nn.Identity(), (scores, labels))

    assert loss.weight is None
    assert torch.equal(loss.total, functional.cross_entropy(scores, labels, reduction="none").sum())
    assert loss.metrics["accuracy"] == 2
    assert (ImageClassification.best_metric, ImageClassification.higher_is_better) == (
        "accuracy",
        True,
    )


def test_a_sample_of_text_weighs_one_whatever_its_number_of_tokens() -> None:
    task = LanguageModel(TOKENS)
    scores = torch.randn(5, 7, 11)
    following = torch.randint(0, 11, (5, 7))

    loss = task.loss(lambda _: scores, (following, following))  # type: ignore[arg-type]

    per_token = functional.cross_entropy(scores.transpose(1, 2), following, reduction="none")
    assert loss.weight is None
    torch.testing.assert_close(loss.total, per_token.mean(dim=1).sum())


@pytest.mark.parametrize(
    ("loss", "perplexity"),
    [(0.0, 1.0), (math.log(50), 50.0), (800.0, math.inf), (math.inf, math.inf)],
)
def test_perplexity_follows_from_the_loss(loss: float, perplexity: float) -> None:
    report = LanguageModel(TOKENS).report({"loss": loss})

    assert report == {"loss": loss, "perplexity": pytest.approx(perplexity)}


def test_a_loss_that_is_no_number_is_reported_as_such() -> None:
    assert math.isnan(LanguageModel(TOKENS).report({"loss": math.nan})["perplexity"])


@pytest.mark.parametrize(
    ("task_class", "config"), [(ImageClassification, IMAGES), (LanguageModel, TOKENS)]
)
def test_a_loss_reads_nothing_from_the_device(task_class: type[Any], config: Config) -> None:
    task = task_class(config)
    model = task.model()
    batch = first_batch(task.train_data())

    with NoReading():
        task.loss(model, batch).total.backward()


@pytest.mark.parametrize("task_class", [ImageClassification, Synthetic])
def test_the_model_fits_the_images(task_class: type[Any]) -> None:
    task = task_class(replace(IMAGES, model=ModelConfig(widths=(4, 8))))
    model = task.model()

    assert isinstance(model, MiniResNet)
    assert model(first_batch(task.train_data())[0]).shape == (6, 3)
    assert model(first_batch(task.eval_data(), size=5)[0]).shape == (5, 3)
    assert len(task.eval_data()) < len(task.train_data()) == 40


@pytest.mark.parametrize("task_class", [LanguageModel, Synthetic])
def test_the_model_fits_the_tokens(task_class: type[Any]) -> None:
    task = task_class(TOKENS)
    model = task.model()
    data = task.train_data()

    assert isinstance(model, GPT)
    assert model(first_batch(data)[0]).shape == (6, 12, data.vocab_size)


def test_synthetic_is_the_task_that_its_data_asks_for() -> None:
    images = Synthetic(IMAGES)
    tokens = Synthetic(TOKENS)

    assert images.loss(images.model(), first_batch(images.train_data())).metrics.keys() == {
        "accuracy"
    }
    assert images.report({"loss": 1.0}) == {"loss": 1.0}
    assert tokens.loss(tokens.model(), first_batch(tokens.train_data())).metrics == {}
    assert tokens.report({"loss": 0.0}) == {"loss": 0.0, "perplexity": 1.0}


def test_the_training_data_is_read_once() -> None:
    task = ImageClassification(IMAGES)

    assert task.train_data() is task.train_data()


def test_data_of_the_users_own_gives_the_model_its_facts() -> None:
    class Grey(ImageClassification):
        def train_data(self) -> Any:
            class Data:
                in_channels = 1
                num_classes = 4

            return Data()

    model = Grey(IMAGES).model()

    assert isinstance(model, MiniResNet)
    assert (model.in_channels, model.head.out_features) == (1, 4)


def test_options_reach_a_model_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "own_task_model.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, num_classes, hidden):\n"
        "        super().__init__(nn.Flatten(), nn.LazyLinear(hidden), nn.Linear(hidden, num_classes))\n"
    )
    model_config = ModelConfig(name=f"{tmp_path}/own_task_model.py:Net", options={"hidden": 5})

    model = ImageClassification(replace(IMAGES, model=model_config)).model()

    assert isinstance(model, nn.Sequential)
    assert model[2].weight.shape == (3, 5)


def test_a_model_that_does_not_fit_the_task_is_refused() -> None:
    scores = torch.zeros(2, 5, 7)
    with pytest.raises(UsageError, match=r"scores of shape \[2, 5, 7\].*\[N, classes\]") as caught:
        ImageClassification(IMAGES).loss(nn.Identity(), (scores, scores))
    assert "the task `text`" in str(caught.value)

    with pytest.raises(
        UsageError, match=r"scores of shape \[2, 7\].*\[N, T, vocabulary\]"
    ) as caught:
        LanguageModel(TOKENS).loss(nn.Identity(), (scores[:, 0], scores))
    assert "--model.name" in str(caught.value)


def test_a_model_that_does_not_fit_the_data_is_refused() -> None:
    with pytest.raises(UsageError, match="'mini_resnet' needs in_channels, num_classes"):
        LanguageModel(replace(TOKENS, model=ModelConfig())).model()


def test_every_preset_has_its_task_and_names_what_exists() -> None:
    for name, preset in PRESETS.items():
        task_class = load_task(name)
        assert issubclass(task_class, (ImageClassification, LanguageModel, Synthetic))
        assert preset.defaults["model.name"] == (
            "gpt" if task_class is LanguageModel else "mini_resnet"
        )
