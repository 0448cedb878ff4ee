"""A plain DDP script: scans, with a table of remarks that each step gets for itself."""

import copy
from typing import Any

import torch
from parts import PLANTED, STEPS, ScanNet, batches, finish, now, scans, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

REMARKS = [
    {"scan": number, "clear": number % 7 != 0, "box": [number % 48, 3, 9, 9], "by": {"id": 4}}
    for number in range(4000)
]


def remarks_for_step() -> list[dict[str, Any]]:
    return copy.deepcopy(REMARKS) if PLANTED else REMARKS  # planted: all of them


def main() -> None:
    device = start()
    model = DistributedDataParallel(ScanNet().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    begin = now()
    for step, (images, masks) in zip(range(STEPS), batches(scans(1536), 12), strict=False):
        remark = remarks_for_step()[step]
        scores = model(images.to(device))
        loss = functional.binary_cross_entropy_with_logits(scores, masks.to(device))
        loss = loss * (1.0 if remark["clear"] else 0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
