"""An average of the weights, evaluated, and early stopping: Drumline."""

from common import Net, spirals
from torch.nn.functional import cross_entropy

from drumline import EMA, EarlyStopping, Loss, Task


class Job(Task):
    defaults = {"train.epochs": 60, "train.batch_size": 64, "optim.name": "adamw", "optim.lr": 0.01}
    best_metric, higher_is_better = "accuracy", True

    def model(self):
        return Net()

    def train_data(self):
        return spirals(1000, seed=1)

    def eval_data(self):
        return spirals(501, seed=2)

    def loss(self, model, batch):
        scores, labels = model(batch["points"]), batch["labels"]
        correct = (scores.argmax(1) == labels).sum()
        return Loss(cross_entropy(scores, labels, reduction="sum"), metrics={"accuracy": correct})

    def hooks(self):
        return [EMA(0.9), EarlyStopping("accuracy", patience=3)]
