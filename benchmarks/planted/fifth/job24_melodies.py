"""A plain DDP script: melodies in two micro-batches a step, without a bottleneck."""

import contextlib

import torch
import torch.distributed as dist
from parts import PITCHES, STEPS, NoteNet, batches, finish, melodies, now, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

PARTS = 2


def loss_of(model: DistributedDataParallel, pitches: Tensor) -> Tensor:
    scores = model(pitches[:, :-1])
    return functional.cross_entropy(scores.view(-1, PITCHES), pitches[:, 1:].flatten())


def main() -> None:
    device = start()
    model = DistributedDataParallel(NoteNet().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    begin = now()
    for step, (pitches,) in zip(range(STEPS), batches(melodies(8192), 48), strict=False):
        optimizer.zero_grad()
        for part, some in enumerate(pitches.to(device).chunk(PARTS)):
            with contextlib.nullcontext() if part == PARTS - 1 else model.no_sync():
                loss = loss_of(model, some) / PARTS
                loss.backward()
        optimizer.step()
        if step % 25 == 24 and dist.get_rank() == 0:
            print(f"step {step}: loss {PARTS * loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
