import torch
import torch.distributed as dist


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n=1):
        self.sum += float(value) * n
        self.count += n

    def all_reduce(self):
        packed = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(packed, dist.ReduceOp.SUM)
        self.sum, self.count = packed.tolist()

    @property
    def avg(self):
        return self.sum / max(self.count, 1)
