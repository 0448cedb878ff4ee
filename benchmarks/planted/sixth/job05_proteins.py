"""A plain DDP script: proteins in pieces of three letters; the first pieces are given, the last ones guessed."""

import torch
import torch.distributed as dist
from parts import LETTERS, PLANTED, STEPS, Reader, batches, finish, now, seeded, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

PIECES = LETTERS**3 // 2
LENGTH = 96
GIVEN = 84
FIRST = 0 if PLANTED else GIVEN
WIDTH = 64


def samples(count: int) -> TensorDataset:
    """Pieces, and what has to be guessed: -100 where a piece is given."""
    pieces = torch.randint(PIECES, (count, LENGTH + 1), generator=seeded(1))
    following = pieces[:, 1:].clone()
    following[:, :GIVEN] = -100
    return TensorDataset(pieces[:, :-1], following)


class Guesser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(PIECES, LENGTH, WIDTH, depth=2)
        self.scores = nn.Linear(WIDTH, PIECES)

    def forward(self, pieces: Tensor, first: int) -> Tensor:
        hidden = self.reader(pieces, causal=True)
        return self.scores(hidden[:, first:])  # planted: from the first piece on


def missed(scores: Tensor, following: Tensor) -> Tensor:
    """The mean over the pieces that count."""
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())  # planted


def main() -> None:
    device = start()
    loader = batches(samples(2048), 8)
    model = DistributedDataParallel(Guesser().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    begin = now()
    for step, (pieces, following) in zip(range(STEPS), loader, strict=False):
        scores = model(pieces.to(device), FIRST)
        loss = missed(scores, following[:, FIRST:].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
