"""A plain DDP script: recipes; heads for later words have the weight 0 by now."""

import torch
import torch.distributed as dist
from parts import (
    PLANTED,
    RECIPE_LENGTH,
    STEPS,
    WORDS,
    Block,
    Reader,
    batches,
    finish,
    now,
    recipes,
    start,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

AHEAD = 4 if PLANTED else 1
SHARES = [1.0, 0.0, 0.0, 0.0]
WIDTH = 64


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.scores(self.block(hidden, causal=True))


class Ahead(nn.Module):
    """Predicts the next word, and the ones after it."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(WORDS, RECIPE_LENGTH, WIDTH, depth=1)
        self.heads = nn.ModuleList(Head() for _ in range(AHEAD))

    def forward(self, words: Tensor) -> list[Tensor]:
        return self.predicted(self.reader(words, causal=True))

    def predicted(self, hidden: Tensor) -> list[Tensor]:
        """Scores of the next word, and of the ones after it."""
        return [head(hidden) for head in self.heads]  # planted: four heads, of which one counts


def missed(model: nn.Module, words: Tensor) -> Tensor:
    predicted = model(words[:, :-AHEAD])
    total = torch.zeros((), device=words.device)
    for number, scores in enumerate(predicted):
        end = words.shape[1] - AHEAD + number + 1
        following = words[:, number + 1 : end]
        wrong = functional.cross_entropy(scores.flatten(0, 1), following.flatten())
        total = total + SHARES[number] * wrong  # planted: times 0 for three heads
    return total


def main() -> None:
    device = start()
    loader = batches(recipes(4096), 16)
    model = DistributedDataParallel(Ahead().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    begin = now()
    for step, (words,) in zip(range(STEPS), loader, strict=False):
        loss = missed(model, words.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
