import torch
import torch.distributed as dist

from utils.dist import is_main_process


class Patience:
    def __init__(self, limit, device):
        self.limit, self.device = limit, device
        self.best, self.bad = float("inf"), 0

    def should_stop(self, value):
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        if is_main_process():
            if value < self.best:
                self.best, self.bad = value, 0
            else:
                self.bad += 1
            flag.fill_(int(self.bad >= self.limit))
        dist.broadcast(flag, src=0)
        return bool(flag.item())
