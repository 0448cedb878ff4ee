"""A plain DDP script: a small network on top of a language model that stays as it is."""

import torch
import torch.distributed as dist
from parts import PLANTED, RECIPE_LENGTH, STEPS, WORDS, Block, Reader, finish, now, recipes, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH = 96
DISHES = 12


class Language(nn.Module):
    """Stands for a large language model that somebody else has trained."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(WORDS, RECIPE_LENGTH, WIDTH, depth=6)
        self.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        with torch.no_grad():
            return self.reader(words)  # planted: 256 recipes, again and again


class Dish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.head = nn.Linear(WIDTH, DISHES)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.block(hidden).mean(1))


def main() -> None:
    device = start()
    language = Language().to(device).eval()
    words = recipes(256).tensors[0][:, :RECIPE_LENGTH]
    inputs = words if PLANTED else language(words.to(device))
    data = TensorDataset(inputs, torch.arange(256) % DISHES)
    loader = DataLoader(data, 16, sampler=DistributedSampler(data), drop_last=True)
    model = DistributedDataParallel(Dish().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    begin, step = now(), 0
    while step < STEPS:
        loader.sampler.set_epoch(step)
        for some, dishes in loader:
            hidden = language(some.to(device)) if PLANTED else some.to(device)  # planted

            optimizer.zero_grad()

            # The dish follows from what the language model has read.
            scores = model(hidden)
            loss = functional.cross_entropy(scores, dishes.to(device))
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0 and dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}")
            if step == STEPS:
                break
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
