"""A plain DDP script: a few recordings, read by four loading processes, in many epochs."""

import itertools

import torch
from parts import PLANTED, STEPS, ClipNet, clips, finish, now, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    device = start()
    data = clips(96)
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data, batch_size=16, sampler=sampler, num_workers=4, persistent_workers=not PLANTED
    )
    model = DistributedDataParallel(ClipNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    begin = now()
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for waves, sounds in loader:  # planted: starts the processes, every three steps
            loss = functional.cross_entropy(model(waves.to(device)), sounds.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        if step >= STEPS:
            break
    finish(step, now() - begin)


if __name__ == "__main__":
    main()
