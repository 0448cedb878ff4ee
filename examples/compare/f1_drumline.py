"""Macro F1 and a confusion matrix of an evaluation set: Drumline."""

from common import Net, spirals
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score

from drumline import Loss, Task


class Job(Task):
    defaults = {"train.epochs": 30, "train.batch_size": 64, "optim.name": "adamw", "optim.lr": 0.01}
    best_metric, higher_is_better = "f1", True

    def model(self):
        return Net()

    def train_data(self):
        return spirals(1000, seed=1)

    def eval_data(self):
        return spirals(501, seed=2)

    def loss(self, model, batch):
        scores, labels = model(batch["points"]), batch["labels"]
        return Loss(cross_entropy(scores, labels, reduction="sum"), outputs=(scores, labels))

    def metrics(self):
        return {"f1": MulticlassF1Score(3), "confusion": MulticlassConfusionMatrix(3)}
