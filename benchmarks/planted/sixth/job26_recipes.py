"""A loop with DDPManager: recipes, with a rate that rises first, without a bottleneck."""

import torch
from parts import STEPS, RecipeNet, now, recipes, report
from torch.nn import functional

from drumline import DDPManager


def main() -> None:
    with DDPManager(seed=0) as ddp:
        loader = ddp.loader(recipes(6144), batch_size=40)
        model = ddp.wrap(RecipeNet())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
        rising = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        begin = now()
        for _, (words,) in zip(range(STEPS), loader, strict=False):
            scores = model(words[:, :-1]).flatten(0, 1)
            loss = functional.cross_entropy(scores, words[:, 1:].flatten()) * loader.scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rising.step()
        report(STEPS, now() - begin)


if __name__ == "__main__":
    main()
