import math

from torch.optim.lr_scheduler import LambdaLR


def total_steps(num_examples, batch_per_gpu, accum, epochs):
    return epochs * (num_examples // (batch_per_gpu * accum))


def warmup_cosine(optimizer, steps, warmup_ratio=0.05, floor=0.01):
    warmup = int(steps * warmup_ratio)

    def scale(step):
        if step < warmup:
            return (step + 1) / warmup
        t = min(1.0, (step - warmup) / max(1, steps - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * t))

    return LambdaLR(optimizer, scale)
