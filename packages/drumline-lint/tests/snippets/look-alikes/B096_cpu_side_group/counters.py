import torch
import torch.distributed as dist


class HostCounter:
    """Counts on the host and sums over all processes with a gloo group."""

    def __init__(self):
        self.group = dist.new_group(backend="gloo")
        self.hits, self.seen = 0, 0

    def add(self, hits, seen):
        self.hits += hits
        self.seen += seen

    def total(self):
        t = torch.tensor([self.hits, self.seen], dtype=torch.int64)
        dist.all_reduce(t, group=self.group)
        self.hits = self.seen = 0
        return t[0].item() / max(t[1].item(), 1)
