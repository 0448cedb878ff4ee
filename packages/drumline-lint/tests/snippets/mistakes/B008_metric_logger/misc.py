import os
from collections import defaultdict

import torch
import torch.distributed as dist


class SmoothedValue:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    def synchronize_between_processes(self):
        t = torch.tensor([self.total, self.count], dtype=torch.float64, device="cuda")
        dist.all_reduce(t)
        self.total, self.count = t.tolist()

    @property
    def global_avg(self):
        return self.total / max(self.count, 1)


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def update(self, n=1, **kw):
        for k, v in kw.items():
            self.meters[k].update(float(v), n)

    def synchronize(self):
        for name in sorted(self.meters):
            self.meters[name].synchronize_between_processes()

    def __str__(self):
        return "  ".join(f"{k} {m.global_avg:.4f}" for k, m in self.meters.items())


def is_main_process():
    return dist.get_rank() == 0


def init():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    return local_rank
