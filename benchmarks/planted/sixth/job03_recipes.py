"""A plain DDP script: recipes as one long text, of which each sample is a part."""

import torch
import torch.distributed as dist
from parts import (
    PLANTED,
    RECIPE_LENGTH,
    STEPS,
    WORDS,
    RecipeNet,
    batches,
    finish,
    now,
    seeded,
    start,
)
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

LENGTH = 1_200_000


class Parts(Dataset[Tensor]):
    """A part from each place of the text."""

    def __init__(self) -> None:
        self.text = torch.randint(WORDS, (LENGTH,), generator=seeded(1))

    def __len__(self) -> int:
        return LENGTH - RECIPE_LENGTH

    def __getitem__(self, place: int) -> Tensor:
        return self.text[place : place + RECIPE_LENGTH + 1]


class Feed:
    """Gives one batch after another."""

    def __init__(self, loader: DataLoader[Tensor]) -> None:
        self.loader = loader
        self.given = 0
        self.kept = iter(loader)

    def batch(self) -> Tensor:
        self.given += 1
        if PLANTED:
            self.loader.sampler.set_epoch(self.given)
            return next(iter(self.loader))  # planted: mixes all places for one batch
        return next(self.kept)


def main() -> None:
    device = start()
    feed = Feed(batches(Parts(), 8))
    model = DistributedDataParallel(RecipeNet().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    begin = now()
    for step in range(STEPS):
        words = feed.batch().to(device)  # planted

        optimizer.zero_grad()

        # The network reads all words but the last, and predicts all but the first.
        scores = model(words[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
