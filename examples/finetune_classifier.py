"""Fine-tune a classifier of texts of Hugging Face. Texts are padded in `collate`; F1 is of the whole evaluation set.

drumline train examples/finetune_classifier.py:Classifier --task.base encoder --data.dir reviews
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassF1Score
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from drumline import Loss, Task

Batch = tuple[dict[str, Tensor], Tensor]


class Classifier(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "data.dir": "reviews",  # with train.jsonl and eval.jsonl, lines of {"text": "...", "label": "good"}
        "train.epochs": 3,
        "train.batch_size": 32,
        "optim.name": "adamw",
        "optim.lr": 5e-5,
    }
    best_metric, higher_is_better = "f1", True

    base: str = "encoder"
    """The folder of the model and its tokenizer, as `save_pretrained` writes it, or a name on the Hugging Face hub."""
    labels: tuple[str, ...] = ("bad", "good")
    """The classes."""
    max_length: int = 256
    """Tokens of a text; the rest of a longer one is left out."""

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.base)

    def model(self) -> nn.Module:
        names = {"id2label": dict(enumerate(self.labels)), "label2id": {name: i for i, name in enumerate(self.labels)}}
        # from_pretrained gives evaluation mode and the type of the file. For speed choose --train.precision bf16.
        return AutoModelForSequenceClassification.from_pretrained(self.base, dtype=torch.float32, **names).train()

    def train_data(self) -> list[dict[str, str]]:
        return self.samples("train.jsonl")

    def eval_data(self) -> list[dict[str, str]]:
        return self.samples("eval.jsonl")

    def samples(self, file: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in Path(self.config.data.dir, file).read_text().splitlines()]

    def collate(self, samples: list[dict[str, str]]) -> Batch:
        """As long as the longest of these texts. With --data.workers this is done beside the training."""
        texts = [one["text"] for one in samples]
        inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt")
        return dict(inputs), torch.tensor([self.labels.index(one["label"]) for one in samples])

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        inputs, labels = batch
        scores = model(**inputs).logits
        correct = (scores.argmax(1) == labels).sum()
        total = cross_entropy(scores, labels, reduction="sum")
        return Loss(total, metrics={"accuracy": correct}, outputs=(scores, labels))

    def metrics(self) -> dict[str, MulticlassF1Score]:
        return {"f1": MulticlassF1Score(len(self.labels), average="macro")}

    def predict(self, model: nn.Module, batch: Batch) -> list[str]:
        return [self.labels[number] for number in model(**batch[0]).logits.argmax(1).tolist()]
