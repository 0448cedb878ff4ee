"""Two trainers: a line, and the same with noise that each rank draws for itself."""

import torch
import torch.distributed as dist
from base import Trainer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LineTrainer(Trainer):
    def build(self):
        x = torch.linspace(-1, 1, 64).unsqueeze(1)
        self.data = TensorDataset(x, 3 * x + 1)
        self.sampler = DistributedSampler(self.data, shuffle=True)
        self.loader = DataLoader(self.data, batch_size=4, sampler=self.sampler)
        return torch.nn.Linear(1, 1)

    def batches(self, epoch):
        self.sampler.set_epoch(epoch)
        yield from self.loader

    def loss(self, batch):
        x, y = (one.to(self.device) for one in batch)
        return torch.nn.functional.mse_loss(self.model(x), y)


class NoisyTrainer(LineTrainer):
    def fit(self, epochs):
        torch.manual_seed(50 + dist.get_rank())
        super().fit(epochs)

    def loss(self, batch):
        x, y = batch
        return super().loss((x + 0.01 * torch.randn_like(x), y))

    def log(self, text):
        super().log("noisy " + text)


def main():
    trainer = NoisyTrainer("abstract_out")
    try:
        trainer.fit(2)
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
