import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR


def make(model, steps, lr=5e-5):
    decay, rest = [], []
    for p in model.parameters():
        (decay if p.dim() > 1 else rest).append(p)
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1},
                             {"params": rest, "weight_decay": 0.0}], lr=lr)
    warm = max(1, steps // 20)
    sched = SequentialLR(opt, [LinearLR(opt, 0.01, 1.0, warm), CosineAnnealingLR(opt, max(1, steps - warm))],
                         milestones=[warm])
    return opt, sched
