"""Killed and started again, with dropout and a new order every epoch: Drumline."""

from common import Net, spirals
from torch.nn.functional import cross_entropy

from drumline import Loss, Task


class Job(Task):
    defaults = {
        "train.epochs": 4,
        "train.batch_size": 64,
        "optim.name": "adamw",
        "optim.lr": 0.01,
        "checkpoint.every_steps": 20,
    }

    def model(self):
        return Net(dropout=0.1)

    def train_data(self):
        return spirals(1000, seed=1)

    def loss(self, model, batch):
        return Loss(cross_entropy(model(batch["points"]), batch["labels"], reduction="sum"))
