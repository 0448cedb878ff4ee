import math

from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer, total, warmup):
    first = max(1, int(total * warmup))

    def factor(step):
        if step < first:
            return (step + 1) / first
        done = min(1.0, (step - first) / max(1, total - first))
        return 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)
