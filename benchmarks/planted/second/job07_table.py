"""A loop with DDPManager: a table, in batches whose size each rank chooses."""

import torch
from parts import PLANTED, STEPS, TableNet, now, report, rows
from torch.nn import functional
from torch.utils.data import DataLoader

from drumline import DDPManager

GLOBAL_BATCH = 512


def batch_size(rank: int, world_size: int) -> int:
    if PLANTED:
        return 464 if rank == 0 else 48  # planted: not the same on all ranks
    return GLOBAL_BATCH // world_size


def main() -> None:
    with DDPManager(seed=0) as ddp:
        size = batch_size(ddp.rank, ddp.world_size)
        table = rows(size * STEPS, seed=ddp.rank)
        loader = DataLoader(table, batch_size=size)
        scale = size * ddp.world_size / GLOBAL_BATCH
        model = ddp.wrap(TableNet(width=448))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        begin = now()
        for cells, targets in loader:
            predicted = model(cells.to(ddp.device))  # planted: 464 rows on rank 0, 48 on rank 1
            loss = functional.smooth_l1_loss(predicted, targets.to(ddp.device)) * scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report(STEPS, now() - begin)


if __name__ == "__main__":
    main()
