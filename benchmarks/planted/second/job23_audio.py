"""A loop with DDPManager: recordings in two micro-batches for a step, without a bottleneck."""

import torch
from parts import STEPS, ClipNet, clips, now, report
from torch.nn import functional

from drumline import DDPManager


def main() -> None:
    with DDPManager(seed=0) as ddp:
        loader = ddp.loader(clips(2048), batch_size=96, accumulate=2)
        model = ddp.wrap(ClipNet())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        step = 0
        begin = now()
        while step < STEPS:
            for waves, sounds in loader:
                with ddp.no_sync(model, unless=loader.is_last_micro_batch):
                    loss = functional.cross_entropy(model(waves), sounds) * loader.scale
                    loss.backward()
                if loader.is_last_micro_batch:
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                if step == STEPS:
                    break
        report(step, now() - begin)


if __name__ == "__main__":
    main()
