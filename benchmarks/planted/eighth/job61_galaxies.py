"""A plain DDP script: spectra of galaxies, and how far away each of them is."""

import torch
import torch.distributed as dist
from parts import ON_GPU, STEPS, finish, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 256 if ON_GPU else 4
PATCHES = 256 if ON_GPU else 8
PATCH = 16
WIDTH = 512 if ON_GPU else 32


class Block(nn.Module):
    """Mixes the patches of a spectrum, then the features of each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mix = nn.Linear(PATCHES, PATCHES)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, patches: Tensor) -> Tensor:
        mixed = self.mix(self.norms[0](patches).transpose(1, 2))
        patches = patches + mixed.transpose(1, 2)
        return patches + self.narrow(functional.gelu(self.widen(self.norms[1](patches))))


class RedshiftNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.redshift = nn.Linear(WIDTH, 1)

    def forward(self, flux: Tensor) -> Tensor:
        patches = self.patches(flux.unflatten(1, (PATCHES, PATCH)))
        return self.redshift(self.blocks(patches).mean(1)).squeeze(1)


def main() -> None:
    device = start()
    model = RedshiftNet().to(device)
    model = DistributedDataParallel(model, bucket_cap_mb=5, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0003, fused=True)
    flux = torch.randn(8 * BATCH, PATCHES * PATCH, device=device)
    redshifts = torch.rand(len(flux), device=device)

    for step in range(STEPS):
        chosen = torch.randint(len(flux), (BATCH,), device=device)
        loss = functional.smooth_l1_loss(model(flux[chosen]), redshifts[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    finish()


if __name__ == "__main__":
    main()
