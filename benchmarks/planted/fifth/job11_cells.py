"""A plain DDP script: cells, with the average precision of all pixels so far in every step."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, CellNet, batches, cells, finish, now, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Precision:
    """Average precision since the beginning of the epoch."""

    def __init__(self) -> None:
        self.scores: list[Tensor] = []
        self.masks: list[Tensor] = []

    def update(self, scores: Tensor, masks: Tensor) -> None:
        self.scores.append(scores.detach().flatten().cpu())
        self.masks.append(masks.flatten().cpu())

    def compute(self) -> float:
        order = torch.cat(self.scores).argsort(descending=True)  # planted: all pixels so far
        right = torch.cat(self.masks)[order]  # planted
        hits = right.cumsum(0)
        precisions = hits / torch.arange(1, len(right) + 1)
        return float((precisions * right).sum() / right.sum().clamp(min=1))


def main() -> None:
    device = start()
    precision = Precision()
    latest = 0.0
    model = DistributedDataParallel(CellNet(width=4).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    begin = now()
    for step, (pictures, masks) in zip(range(STEPS), batches(cells(3072), 24), strict=False):
        scores = model(pictures.to(device))
        loss = functional.binary_cross_entropy_with_logits(scores, masks[:, 0].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        # For the progress bar.
        precision.update(scores, masks)
        if PLANTED or step == STEPS - 1:
            latest = precision.compute()  # planted
    seconds = now() - begin
    if dist.get_rank() == 0:
        print(f"average precision {latest:.4f}")
    finish(STEPS, seconds)


if __name__ == "__main__":
    main()
