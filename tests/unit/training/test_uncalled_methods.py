"""Methods that another library would call are named, with what to use here."""

from __future__ import annotations

from typing import Any

from drumline.training.tasks import ImageClassification, Task
from drumline.training.tasks.built_in import uncalled_methods


class FromElsewhere(Task):
    best_metric = "acc"

    def configure_optimizers(self) -> None: ...

    def training_step(self, batch: Any, index: int) -> None: ...

    def validation_step(self, batch: Any, index: int) -> None: ...

    def train_dataloader(self) -> None: ...

    def val_dataloader(self) -> None: ...

    def on_epoch_end(self) -> None: ...

    def on_train_batch_start(self) -> None: ...

    def once_more(self) -> None: ...


class Inherits(FromElsewhere):
    def on_epoch_end(self) -> None:
        super().on_epoch_end()


class CallsThem(Task):
    """Ported, with its own methods kept: nothing to say."""

    def training_step(self, batch: Any) -> Any:
        return batch

    def prepare_data(self) -> list[int]:
        return [1]

    def train_data(self) -> Any:
        return [list(self.prepare_data()) for _ in range(2)]

    def loss(self, model: Any, batch: Any) -> Any:
        return self.training_step(batch)


def test_each_is_named_once_with_what_to_use_instead() -> None:
    sentences = list(uncalled_methods(FromElsewhere))
    assert [sentence.partition("()")[0] for sentence in sentences] == [
        f"FromElsewhere.{name}"
        for name in (
            "configure_optimizers",
            "training_step",
            "validation_step",
            "train_dataloader",
            "val_dataloader",
            "on_epoch_end",
            "on_train_batch_start",
        )
    ]
    assert sentences[0] == (
        "FromElsewhere.configure_optimizers() is never called: write optimizer(model), which returns one, or choose it "
        "by --optim.name"
    )
    assert sentences[1].endswith(
        "write loss(model, batch), which training and evaluation both call"
    )
    assert "write train_data()" in sentences[3]
    assert "write eval_data()" in sentences[4]
    assert sentences[5].endswith("write a drumline.Hook and list it in hooks() (docs/hooks.md)")


def test_those_of_a_base_class_are_named_too_and_super_is_no_use() -> None:
    assert len(list(uncalled_methods(Inherits))) == 7


def test_what_the_task_calls_itself_is_its_own() -> None:
    assert list(uncalled_methods(CallsThem)) == []
    assert list(uncalled_methods(ImageClassification)) == []
