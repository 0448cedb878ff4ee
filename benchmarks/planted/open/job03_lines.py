"""A plain DDP script: text, with a decaying memory that a loop over positions computes."""

import time

import torch
from parts import PLANTED, STEPS, LineNet, batches, finish, line_loss, lines, start
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

DECAYS = (0.5, 0.8, 0.9, 0.95)


class MemoryNet(LineNet):
    def remember(self, hidden: Tensor, decay: float) -> Tensor:
        memory = torch.zeros_like(hidden[:, 0])
        memories = []
        for position in range(hidden.shape[1]):
            memory = decay * memory + (1 - decay) * hidden[:, position]  # planted
            memories.append(memory)
        return torch.stack(memories, dim=1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden(tokens)
        if PLANTED:
            for decay in DECAYS:
                hidden = hidden + self.remember(hidden, decay)
        return self.scores(hidden)


def main() -> None:
    device = start()
    model = DistributedDataParallel(MemoryNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = time.perf_counter()
    for _, (tokens,) in zip(range(STEPS), batches(lines(4096)), strict=False):
        loss = line_loss(model, tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
