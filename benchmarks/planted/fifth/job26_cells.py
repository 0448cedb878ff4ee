"""A loop with DDPManager: cells, some of them mirrored, without a bottleneck."""

import torch
from parts import STEPS, CellNet, cells, now, report
from torch import Tensor
from torch.nn import functional

from drumline import DDPManager


def mirrored(pictures: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    turns = torch.rand(len(pictures), 1, 1, 1, device=pictures.device) < 0.5
    pictures = torch.where(turns, pictures.flip(3), pictures)
    return pictures, torch.where(turns, masks.flip(3), masks)


def main() -> None:
    with DDPManager(seed=0) as ddp:
        loader = ddp.loader(cells(3072), batch_size=40)
        model = ddp.wrap(CellNet())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        begin = now()
        for _, batch in zip(range(STEPS), loader, strict=False):
            pictures, masks = mirrored(*batch)
            scores = model(pictures)
            loss = functional.binary_cross_entropy_with_logits(scores, masks[:, 0]) * loader.scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report(STEPS, now() - begin)


if __name__ == "__main__":
    main()
