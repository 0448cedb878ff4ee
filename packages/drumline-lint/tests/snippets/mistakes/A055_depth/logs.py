import json
from collections import defaultdict

import torch
import torch.distributed as dist


class MetricLogger:
    def __init__(self, path, device):
        self.path, self.device = path, device
        self.values = defaultdict(list)

    def update(self, **metrics):
        for name, value in metrics.items():
            self.values[name].append(value)

    def flush(self, epoch):
        if dist.get_rank() != 0:
            return
        row = {"epoch": epoch}
        for name in sorted(self.values):
            vals = self.values[name]
            t = torch.tensor([sum(vals), len(vals)], device=self.device)
            dist.all_reduce(t)
            row[name] = (t[0] / t[1]).item()
        with open(self.path, "a") as fh:
            fh.write(json.dumps(row) + "\n")
        self.values.clear()
