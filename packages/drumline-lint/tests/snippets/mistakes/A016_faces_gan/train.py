import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

from ckpt import restore, store
from nets import Critic, Generator


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--faces", required=True)
    ap.add_argument("--resume", default="")
    ap.add_argument("--epochs", type=int, default=100)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    torch.manual_seed(31 + dist.get_rank())

    tf = transforms.Compose([transforms.Resize(64), transforms.CenterCrop(64), transforms.ToTensor()])
    ds = datasets.ImageFolder(args.faces, tf)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=8, drop_last=True)

    gen = DDP(Generator().to(device), device_ids=[local_rank])
    critic = DDP(Critic().to(device), device_ids=[local_rank])
    g_opt = torch.optim.Adam(gen.parameters(), 2e-4, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.999))
    start = restore(args.resume, gen, critic, g_opt, d_opt) if args.resume else 0

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for real, _ in loader:
            real = real.to(device)
            z = torch.randn(real.size(0), 128, device=device)
            fake = gen(z)
            both = critic(torch.cat([real, fake.detach()]))
            d_loss = F.softplus(-both[:real.size(0)]).mean() + F.softplus(both[real.size(0):]).mean()
            d_opt.zero_grad()
            d_loss.backward()
            d_opt.step()
            g_loss = F.softplus(-critic(fake)).mean()
            g_opt.zero_grad()
            g_loss.backward()
            g_opt.step()
        if dist.get_rank() == 0:
            store(f"gan_{epoch}.pt", epoch, gen, critic, g_opt, d_opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
