import torch
import torch.distributed as dist


class Accuracy:
    def __init__(self, device):
        self.counts = torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, logits, target):
        self.counts[0] += (logits.argmax(1) == target).sum()
        self.counts[1] += target.numel()

    def compute(self):
        total = self.counts.clone()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()
