"""The loop: gradients are accumulated over some micro batches, and exchanged at the last of them only."""

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from env import rank_zero_only


@dataclass
class LoopConfig:
    epochs: int = 2
    batch_size: int = 16
    accumulate: int = 4
    learning_rate: float = 1e-2
    seed: int = 99
    path: str = "loop.pt"


class Loop:
    def __init__(self, env, config, network, loss_function, train_set, val_set):
        self.env = env
        self.config = config
        self.loss_function = loss_function
        self.network = network.to(env.device)
        self.model = DistributedDataParallel(self.network, device_ids=[env.local_rank] if env.cuda else None, bucket_size_mb=50)  # <- unknown-argument
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=config.learning_rate, momentum=0.9)
        self.sampler = DistributedSampler(train_set, seed=config.seed)
        self.loader = DataLoader(train_set, config.batch_size, sampler=self.sampler, pin_memory=env.cuda, drop_last=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, config.learning_rate, total_steps=self.total_steps)
        self.val_set = val_set
        self.best = float("inf")
        torch.manual_seed(config.seed + env.rank)

    @property
    def is_master(self):
        return self.env.is_master

    @property
    def total_steps(self):
        return self.config.epochs * (len(self.loader) // self.config.accumulate)

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        usable = len(self.loader) // self.config.accumulate * self.config.accumulate
        for number, (inputs, targets) in enumerate(self.loader):
            if number == usable:
                break
            last = (number + 1) % self.config.accumulate == 0
            inputs = inputs.to(self.env.device, non_blocking=True)
            targets = targets.to(self.env.device, non_blocking=True)
            with contextlib.nullcontext():
                loss = self.loss_function(self.model(inputs), targets) / self.config.accumulate
                loss.backward()  # <- accumulation-without-no-sync
            self.scheduler.step()
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()

    @torch.no_grad()
    def validate(self):
        """On the master alone, of the network that is not wrapped; the others are told."""
        result = torch.zeros((), device=self.env.device)
        if self.is_master:
            self.network.eval()
            for inputs, targets in DataLoader(self.val_set, self.config.batch_size):
                outputs = self.network(inputs.to(self.env.device))
                result += self.loss_function(outputs, targets.to(self.env.device)) * len(inputs)
            result /= len(self.val_set)
            dist.broadcast(result, src=0)  # <- collective-on-some-ranks
        return result.item()

    @rank_zero_only
    def save(self, epoch, score):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch}  # <- wrapped-state-dict
        torch.save(state | {"score": score}, self.config.path)
        print(f"saved epoch {epoch} with {score:.4f}")

    def run(self):
        for epoch in range(self.config.epochs):
            self.train_epoch(epoch)
            score = self.validate()
            print(f"epoch {epoch}: {score:.4f}")  # <- unguarded-print
            if score < self.best:
                self.best = score
                self.save(epoch, score)
        dist.barrier()
