"""Early stopping that is decided in one place."""
import torch
import torch.distributed as dist


class Stopper:
    """Rank 0 keeps the history; the others only hear the verdict."""

    def __init__(self, patience, device):
        self.patience, self.device = patience, device
        self.best, self.bad = float("inf"), 0

    def update(self, value):
        verdict = torch.zeros(2, dtype=torch.int32, device=self.device)
        if dist.get_rank() == 0:
            if value < self.best:
                self.best, self.bad = value, 0
                verdict[0] = 1
            else:
                self.bad += 1
            verdict[1] = int(self.bad >= self.patience)
        dist.broadcast(verdict, src=0)
        improved, stop = verdict.tolist()
        return bool(improved), bool(stop)
