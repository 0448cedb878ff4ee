import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

from env import launch
from networks import Discriminator, Generator, weights_init

NZ = 100


def bce(logits, value):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


def train(env):
    torch.manual_seed(999 + env.rank)
    tf = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
    data = datasets.ImageFolder("data/celeba", tf)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 128, sampler=sampler, num_workers=4, drop_last=True)
    G = DDP(Generator(NZ).apply(weights_init).to(env.device), device_ids=[env.local_rank])
    D = DDP(Discriminator().apply(weights_init).to(env.device), device_ids=[env.local_rank])
    og = torch.optim.Adam(G.parameters(), 2e-4, (0.5, 0.999))
    od = torch.optim.Adam(D.parameters(), 2e-4, (0.5, 0.999))
    for epoch in range(60):
        sampler.set_epoch(epoch)
        for real, _ in loader:
            real = real.to(env.device, non_blocking=True)
            z = torch.randn(len(real), NZ, 1, 1, device=env.device)
            fake = G(z)

            D.requires_grad_(True)
            out_real = D(real)
            out_fake = D(fake.detach())
            d_loss = bce(out_real, 1.0) + bce(out_fake, 0.0)
            od.zero_grad(set_to_none=True)
            d_loss.backward()
            od.step()

            D.requires_grad_(False)
            g_loss = bce(D(fake), 1.0)
            og.zero_grad(set_to_none=True)
            g_loss.backward()
            og.step()
        if env.is_main:
            print(f"{epoch} D {d_loss.item():.3f} G {g_loss.item():.3f}")
            torch.save({"G": G.module.state_dict(), "D": D.module.state_dict()}, "dcgan.pt")


if __name__ == "__main__":
    launch(train)
