"""Level 1: your own loop with DDPManager. The same script runs alone and on any number of ranks.

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
from spirals import Net, spirals
from torch import nn

from drumline import DDPManager


def main() -> None:
    with DDPManager(seed=0) as ddp:
        train_data, test_data = spirals(1000, seed=1), spirals(500, seed=2)
        loader = ddp.loader(train_data, batch_size=64)
        test_loader = ddp.loader(test_data, batch_size=250, train=False)
        model = ddp.wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        criterion = nn.CrossEntropyLoss()

        for _epoch in range(10):
            for points, arm in loader:
                loss = criterion(model(points), arm) * loader.scale
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        correct = torch.zeros(2, device=ddp.device)
        model.eval()
        with torch.no_grad():
            for points, arm in test_loader:
                correct += torch.stack(
                    [(model(points).argmax(1) == arm).sum(), torch.tensor(len(arm), device=ddp.device)]
                )
        ddp.sum(correct)
        if ddp.is_main_process():
            print(f"accuracy {correct[0] / correct[1]:.3f}")


if __name__ == "__main__":
    main()
