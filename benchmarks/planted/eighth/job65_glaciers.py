"""A plain DDP script: how much ice melts, of maps of the weather as a reanalysis has them."""

import numpy as np
import torch
import torch.distributed as dist
from parts import ON_GPU, STEPS, finish, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

HOURS = 16 if ON_GPU else 2
VARIABLES = 12
SIZE = 256 if ON_GPU else 32
WIDTH = 128 if ON_GPU else 8


class MeltNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Conv2d(VARIABLES, WIDTH, 4, stride=4)
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(4))
        self.melt = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, weather: Tensor) -> Tensor:
        values = functional.relu(self.coarse(weather))
        for layer in self.layers:
            values = values + functional.relu(layer(values))
        return self.melt(values).mean((1, 2, 3))


def read_archive() -> tuple[Tensor, Tensor]:
    """Two weeks of hours, as numpy reads them."""
    random = np.random.default_rng(dist.get_rank())
    weather = random.standard_normal((8 * HOURS, VARIABLES, SIZE, SIZE))
    melt = weather[:, 0, :8, :8].mean((1, 2))
    return torch.from_numpy(weather), torch.from_numpy(melt)


def main() -> None:
    device = start()
    torch.set_float32_matmul_precision("high")
    model = DistributedDataParallel(MeltNet().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    all_weather, all_melt = read_archive()
    starts = torch.randint(len(all_weather) - HOURS, (STEPS,)).tolist()

    for step, begin in enumerate(starts):
        # A batch is a stretch of hours, one after another.
        weather = all_weather[begin : begin + HOURS].to(device).float()  # planted
        melt = all_melt[begin : begin + HOURS].to(device).float()

        # Melt depends on all of the map, so the
        # network sees each hour as a whole.

        loss = functional.mse_loss(model(weather), melt)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    finish()


if __name__ == "__main__":
    main()
