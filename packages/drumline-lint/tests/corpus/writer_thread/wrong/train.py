"""Rank 0 writes its checkpoints in a thread, so that training goes on meanwhile."""

import os
import queue
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Writer:
    """Does nothing on other ranks: they have none."""

    def __init__(self):
        self.todo = queue.Queue(maxsize=1)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self):
        while (job := self.todo.get()) is not None:
            state, path = job
            torch.save(state, path + ".part")  # <- unguarded-save
            os.replace(path + ".part", path)
            print("written:", path)  # <- unguarded-print

    def put(self, model, optimizer, path):
        weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        self.todo.put(({"model": weights, "optimizer": optimizer.state_dict()}, path))

    def close(self):
        self.todo.put(None)
        self.thread.join()


def train(device, writer):
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(10, 1).to(device), device_ids=None if device.type == "cpu" else [device.index])
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(80, 10), torch.randn(80, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler, drop_last=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.l1_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        if writer is not None:
            writer.put(model.module, optimizer, f"writer_{epoch}.pt")


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    writer = Writer()
    try:
        train(device, writer)
    finally:
        if writer is not None:
            writer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
