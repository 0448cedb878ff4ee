"""A loss per token, with padding and accumulated micro-batches: Drumline."""

from common import Words, pad, sentences
from torch.nn.functional import cross_entropy
from torchmetrics import SumMetric

from drumline import Loss, Task


class Job(Task):
    defaults = {
        "train.epochs": 3,
        "train.batch_size": 32,
        "train.accumulate": 2,
        "optim.name": "adamw",
        "optim.lr": 0.01,
    }
    collate = staticmethod(pad)

    def model(self):
        return Words()

    def train_data(self):
        return sentences(330, seed=1)

    def eval_data(self):
        return sentences(333, seed=2)

    def loss(self, model, batch):
        tokens = (batch["labels"] != -100).sum()
        total = cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["labels"], reduction="sum")
        return Loss(total, weight=tokens, outputs=(tokens,))

    def metrics(self):
        return {"tokens": SumMetric()}
