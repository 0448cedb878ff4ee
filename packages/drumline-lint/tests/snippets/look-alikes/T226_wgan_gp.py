import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms as T
from torchvision.utils import save_image

NZ, N_CRITIC, GP = 100, 5, 10.0


class G(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(NZ, 256 * 16)
        self.net = nn.Sequential(nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.GroupNorm(8, 128), nn.ReLU(),
                                 nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.GroupNorm(8, 64), nn.ReLU(),
                                 nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())

    def forward(self, z):
        return self.net(self.fc(z).view(-1, 256, 4, 4))


class Critic(nn.Module):
    """scores, and the input-gradient norm when asked for, in one forward"""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1),
                                 nn.LeakyReLU(0.2), nn.Conv2d(128, 256, 4, 2, 1), nn.LeakyReLU(0.2),
                                 nn.Flatten(), nn.Linear(256 * 16, 1))

    def forward(self, real, fake):
        eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
        mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
        g, = torch.autograd.grad(self.net(mix).sum(), mix, create_graph=True)
        penalty = (g.flatten(1).norm(dim=1) - 1).pow(2).mean()
        return self.net(real).mean(), self.net(fake).mean(), penalty


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(77 + rank)
    ds = datasets.LSUN("/data/lsun", ["bedroom_train"],
                       T.Compose([T.Resize(32), T.CenterCrop(32), T.ToTensor(), T.Normalize([0.5] * 3, [0.5] * 3)]))
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=4, drop_last=True)
    gen, critic = DDP(G().cuda(), device_ids=[local_rank]), DDP(Critic().cuda(), device_ids=[local_rank])
    og = torch.optim.Adam(gen.parameters(), 1e-4, betas=(0, 0.9))
    oc = torch.optim.Adam(critic.parameters(), 1e-4, betas=(0, 0.9))
    step = 0
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for real, _ in loader:
            real = real.cuda(non_blocking=True)
            with torch.no_grad():
                fake = gen.module(torch.randn(len(real), NZ, device=real.device))
            r, f, gp = critic(real, fake)
            loss_c = f - r + GP * gp
            oc.zero_grad()
            loss_c.backward()
            oc.step()
            step += 1
            if step % N_CRITIC == 0:
                critic.requires_grad_(False)
                loss_g = -critic.module.net(gen(torch.randn(len(real), NZ, device=real.device))).mean()
                og.zero_grad()
                loss_g.backward()
                og.step()
                critic.requires_grad_(True)
        if rank == 0:
            with torch.no_grad():
                save_image(gen.module(torch.randn(64, NZ, device="cuda")), f"bed_{epoch}.png", normalize=True)
            torch.save(gen.module.state_dict(), "G.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
