"""A plain DDP script: melodies, with activations that are computed again, and again."""

import torch
import torch.distributed as dist
from parts import NOTES, PITCHES, PLANTED, STEPS, Block, batches, finish, melodies, now, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Saving(nn.Module):
    """Four blocks that keep few activations, for a GPU of 8 GB."""

    def __init__(self, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.pitches = nn.Embedding(PITCHES, width)
        self.places = nn.Parameter(0.02 * torch.randn(NOTES, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, PITCHES)

    def forward(self, pitches: Tensor) -> Tensor:
        hidden = self.pitches(pitches) + self.places
        if PLANTED:
            hidden = checkpoint(self.stack, hidden, use_reentrant=False)  # planted: all blocks
        else:
            hidden = self.stack(hidden)
        return self.head(hidden)

    def stack(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = self.through(block, hidden)
        return hidden

    def through(self, block: Block, hidden: Tensor) -> Tensor:
        if PLANTED:
            return checkpoint(block, hidden, None, True, use_reentrant=False)  # planted: each
        return block(hidden, None, True)


def main() -> None:
    device = start()
    model = DistributedDataParallel(Saving().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    begin = now()
    for step, (pitches,) in zip(range(STEPS), batches(melodies(2048), 12), strict=False):
        scores = model(pitches[:, :-1].to(device))
        loss = functional.cross_entropy(scores.flatten(0, 1), pitches[:, 1:].flatten().to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
