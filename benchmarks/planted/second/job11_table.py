"""A loop with DDPManager: a table and a wide network, in six micro-batches for a step."""

import torch
from parts import PLANTED, STEPS, TableNet, now, report, rows
from torch.nn import functional

from drumline import DDPManager

PARTS = 6


def main() -> None:
    with DDPManager(seed=0) as ddp:
        batch_size = 2 * 16 * PARTS
        data = rows(batch_size * STEPS)
        loader = ddp.loader(data, batch_size=batch_size, accumulate=PARTS)
        model = ddp.wrap(TableNet(width=768))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        begin = now()
        for cells, targets in loader:
            with ddp.no_sync(model, unless=PLANTED or loader.is_last_micro_batch):
                loss = functional.smooth_l1_loss(model(cells), targets) * loader.scale
                loss.backward()  # planted: gradients are reduced six times in a step
            if loader.is_last_micro_batch:
                optimizer.step()
                optimizer.zero_grad()
        report(STEPS, now() - begin)


if __name__ == "__main__":
    main()
