import torch
import torch.distributed as dist


class Reporter:
    def __init__(self, path, device):
        self.path = path
        self.acc = torch.zeros(2, device=device)

    def add(self, loss, n):
        self.acc[0] += loss * n
        self.acc[1] += n

    def end_epoch(self, epoch):
        dist.all_reduce(self.acc)
        mean = (self.acc[0] / self.acc[1]).item()
        self.acc.zero_()
        if dist.get_rank() != 0:
            return
        with open(self.path, "a") as fh:
            fh.write(f"{epoch},{mean:.6f}\n")
