"""A plain DDP script: the hidden piece of seven bases, of its neighbours in a genome."""

import torch
from parts import ON_GPU, STEPS, finish, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

PIECES = 4**7 if ON_GPU else 4**4
BATCH = 8192 if ON_GPU else 64
WIDTH = 128 if ON_GPU else 16
NEIGHBOURS = 12


class PieceNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.Embedding(PIECES, WIDTH)
        self.mixed = nn.Sequential(
            nn.Linear(NEIGHBOURS * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, neighbours: Tensor) -> Tensor:
        hidden = self.mixed(self.pieces(neighbours).flatten(1))
        return hidden @ self.pieces.weight.T


@torch.no_grad()
def mean_reciprocal_rank(scores: Tensor, right: Tensor) -> Tensor:
    order = scores.argsort(dim=1, descending=True)  # planted
    places = (order == right[:, None]).float().argmax(dim=1)  # planted
    return (1 / (places + 1)).mean()


def main() -> None:
    device = start()
    model = DistributedDataParallel(PieceNet().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    genome = torch.randint(PIECES, (4_000_000 if ON_GPU else 4000,), device=device)
    half = NEIGHBOURS // 2
    around = torch.tensor([*range(-half, 0), *range(1, half + 1)], device=device)
    quality = torch.zeros((), device=device)

    for step in range(STEPS):
        places = torch.randint(half, len(genome) - half, (BATCH,), device=device)
        right = genome[places]
        scores = model(genome[places[:, None] + around])
        loss = functional.cross_entropy(scores, right)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        # How far down the list of all pieces
        # the right one is found.

        quality += mean_reciprocal_rank(scores.detach(), right)  # planted

        # Now and then it is printed.
        # It is a mean over the last steps.
        if step % 20 == 19:
            print(f"step {step}: loss {loss.item():.4f}, rank {quality.item() / 20:.4f}")
            quality.zero_()
    finish()


if __name__ == "__main__":
    main()
