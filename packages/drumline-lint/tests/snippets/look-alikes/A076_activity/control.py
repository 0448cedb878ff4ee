import torch
import torch.distributed as dist


class StopController:
    def __init__(self, patience, device):
        self.patience, self.device = patience, device
        self.best, self.bad = float("inf"), 0

    def update(self, value):
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        if dist.get_rank() == 0:
            if value < self.best:
                self.best, self.bad = value, 0
            else:
                self.bad += 1
            flag[0] = int(self.bad >= self.patience)
        dist.broadcast(flag, src=0)
        return bool(flag.item())
