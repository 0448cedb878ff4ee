"""A plain DDP script: logs of wind turbines, whose power is foretold."""

import torch
from parts import ON_GPU, STEPS, finish, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 24_576 if ON_GPU else 64
SENSORS = 32
WIDTH = 128 if ON_GPU else 16
DEPTH = 96 if ON_GPU else 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + functional.gelu(self.linear(values))


def main() -> None:
    device = start()
    layers = [nn.Linear(SENSORS, WIDTH), *(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1)]
    model = nn.Sequential(*layers).to(device)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    logs = torch.randn(16 * BATCH, SENSORS, device=device)
    powers = logs[:, :4].sum(1)

    for step in range(STEPS):
        chosen = torch.randint(len(logs), (BATCH,), device=device)
        loss = functional.mse_loss(model(logs[chosen])[:, 0], powers[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

        # Others use this GPU, too:
        # without this line it was full once.

        torch.cuda.empty_cache()  # planted
    finish()


if __name__ == "__main__":
    main()
