import torch
import torch.distributed as dist


class Counter:
    def __init__(self, device):
        self.state = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, hits):
        self.state[0] += hits.sum()
        self.state[1] += hits.numel()

    def compute(self):
        total = self.state.clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        return (total[0] / total[1]).item()
