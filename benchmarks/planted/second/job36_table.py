"""A loop with DDPManager for a GPU: a table, in eight micro-batches for a step."""

import torch
from parts import ON_GPU, PLANTED, STEPS, TableNet, now, report, rows
from torch.nn import functional

from drumline import DDPManager

PARTS = 8 if ON_GPU else 4
SAMPLES = 256 if ON_GPU else 16
WIDTH = 2048 if ON_GPU else 512


def main() -> None:
    with DDPManager(seed=0) as ddp:
        batch_size = 2 * SAMPLES * PARTS
        data = rows(batch_size * STEPS)
        loader = ddp.loader(data, batch_size=batch_size, accumulate=PARTS)
        model = ddp.wrap(TableNet(width=WIDTH, depth=4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        begin = now()
        for cells, targets in loader:
            with ddp.no_sync(model, unless=PLANTED or loader.is_last_micro_batch):
                loss = functional.smooth_l1_loss(model(cells), targets) * loader.scale
                loss.backward()  # planted: gradients are reduced in every micro-batch
            if loader.is_last_micro_batch:
                optimizer.step()
                optimizer.zero_grad()
        report(STEPS, now() - begin)


if __name__ == "__main__":
    main()
