"""A plain DDP script: after how many hours each parcel arrives."""

import csv
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from parts import ON_GPU, STEPS, finish, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 4096 if ON_GPU else 32
DEPOTS = 500
FEATURES = 24
WIDTH = 512 if ON_GPU else 32


class ParcelNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depots = nn.Embedding(DEPOTS, 64)
        self.inner = nn.Sequential(
            nn.Linear(FEATURES + 128, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, ways: Tensor, features: Tensor) -> Tensor:
        values = torch.cat([self.depots(ways).flatten(1), features], dim=1)
        return functional.softplus(self.inner(values).squeeze(1))


def write_predictions(
    writer: Any, step: int, parcels: Tensor, guesses: Tensor, truth: Tensor
) -> None:
    columns = parcels.tolist(), guesses.tolist(), truth.tolist()
    for parcel, guess, hours in zip(*columns, strict=True):
        writer.writerow([step, parcel, f"{guess:.2f}", f"{hours:.2f}"])  # planted


def main() -> None:
    device = start()
    torch.set_float32_matmul_precision("high")
    model = DistributedDataParallel(ParcelNet().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    all_ways = torch.randint(DEPOTS, (32 * BATCH, 2), device=device)
    all_features = torch.randn(len(all_ways), FEATURES, device=device)
    all_hours = 48 * torch.rand(len(all_ways), device=device)
    with tempfile.TemporaryFile("w", newline="") as file:
        writer = csv.writer(file)
        for step in range(STEPS):
            chosen = torch.randint(len(all_ways), (BATCH,), device=device)
            guesses = model(all_ways[chosen], all_features[chosen])
            loss = functional.l1_loss(guesses, all_hours[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            # The dispatchers want to see how single
            # parcels converge, so one rank
            # keeps them in a table.

            if dist.get_rank() == 0:
                write_predictions(writer, step, chosen, guesses, all_hours[chosen])  # planted
    finish()


if __name__ == "__main__":
    main()
