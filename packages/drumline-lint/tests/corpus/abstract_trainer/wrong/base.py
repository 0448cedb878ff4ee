"""What all trainers share; subclasses say what a step is."""

import abc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Trainer(abc.ABC):
    def __init__(self, folder):
        self.folder = folder
        dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl", timeout=timedelta(minutes=5))  # <- group-not-destroyed
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        torch.manual_seed(5)
        self.model = self.wrap(self.build().to(self.device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    @abc.abstractmethod
    def build(self): ...

    @abc.abstractmethod
    def loss(self, batch): ...

    @abc.abstractmethod
    def batches(self, epoch): ...

    def wrap(self, net):
        return DistributedDataParallel(net, device_ids=[self.local_rank] if self.device.type == "cuda" else None)

    @property
    def is_lead(self):
        return dist.get_rank() == 0

    def after_epoch(self, epoch, mean):
        self.write(epoch)
        if self.is_lead:
            self.log(f"epoch {epoch}: {mean:.4f}")

    def log(self, text):
        print(text)  # <- unguarded-print

    def write(self, epoch):
        state = {"net": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch}
        torch.save(state, os.path.join(self.folder, "last.pt"))  # <- unguarded-save

    def fit(self, epochs):
        os.makedirs(self.folder, exist_ok=True)
        for epoch in range(epochs):
            total, count = torch.zeros((), device=self.device), 0
            for batch in self.batches(epoch):
                self.optimizer.zero_grad()
                loss = self.loss(batch)
                loss.backward()
                self.optimizer.step()
                total, count = total + loss.detach(), count + 1
            dist.all_reduce(total)
            self.after_epoch(epoch, total.item() / count / dist.get_world_size())
            dist.barrier()

    def close(self):
        self.log("done")
