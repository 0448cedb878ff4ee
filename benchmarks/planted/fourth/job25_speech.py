"""A plain DDP script: spoken commands in two micro-batches a step, without a bottleneck."""

import contextlib

import torch
from parts import STEPS, SpeechNet, batches, finish, now, speech, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

PARTS = 2


def main() -> None:
    device = start()
    model = DistributedDataParallel(SpeechNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = batches(speech(6144), 48)
    begin = now()
    for _, (sounds, commands) in zip(range(STEPS), loader, strict=False):
        optimizer.zero_grad()
        pairs = zip(sounds.chunk(PARTS), commands.chunk(PARTS), strict=True)
        for part, (some, names) in enumerate(pairs):
            last = part == PARTS - 1
            with contextlib.nullcontext() if last else model.no_sync():
                scores = model(some.to(device))
                (functional.cross_entropy(scores, names.to(device)) / PARTS).backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
