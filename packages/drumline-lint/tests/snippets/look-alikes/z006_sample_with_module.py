import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.utils import save_image

from flow import FlowNet, Textures


@torch.no_grad()
def draw(net, count, device, steps=50):
    net.eval()
    x = torch.randn(count, 3, 128, 128, device=device)
    for i in range(steps):
        t = torch.full((count,), i / steps, device=device)
        x = x + net(x, t) / steps
    net.train()
    return x.clamp(-1, 1)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(1000 + rank)

    textures = Textures("/data/textures")
    sampler = DistributedSampler(textures, drop_last=True)
    loader = DataLoader(textures, batch_size=32, sampler=sampler, num_workers=8,
                        pin_memory=True, drop_last=True)
    model = DDP(FlowNet(channels=128).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

    for epoch in range(200):
        sampler.set_epoch(epoch)
        for x1 in loader:
            x1 = x1.to(device, non_blocking=True)
            x0 = torch.randn_like(x1)
            t = torch.rand(len(x1), device=device)
            mix = t.view(-1, 1, 1, 1)
            velocity = model((1 - mix) * x0 + mix * x1, t)
            loss = (velocity - (x1 - x0)).square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

        if rank == 0 and epoch % 10 == 9:
            samples = draw(model.module, 16, device)
            save_image(samples, f"samples_{epoch:03d}.png", nrow=4, normalize=True, value_range=(-1, 1))
            torch.save(model.module.state_dict(), f"flow_{epoch:03d}.pt")
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
