"""GAN-like two-team training: even ranks train the generator's critic A, odd ranks critic B."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_teams(world):
    a = list(range(0, world, 2))
    b = list(range(1, world, 2))
    return [(a, dist.new_group(a)), (b, dist.new_group(b))]


def critic(depth):
    layers, c = [], 3
    for i in range(depth):
        o = 64 * 2 ** min(i, 3)
        layers += [nn.Conv2d(c, o, 4, 2, 1), nn.LeakyReLU(0.2)]
        c = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 1))


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    teams = make_teams(world)
    members, group = teams[rank % 2]
    depth = 4 if rank % 2 == 0 else 6
    name = "ab"[rank % 2]

    blob = torch.load("/data/realfake/train.pt", map_location="cpu")
    ds = TensorDataset(blob["img"], blob["is_real"].float())
    sampler = DistributedSampler(ds, num_replicas=len(members), rank=members.index(rank), drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=4, drop_last=True)

    net = DDP(critic(depth).cuda(), device_ids=[local], process_group=group)
    opt = torch.optim.Adam(net.parameters(), 2e-4, betas=(0.5, 0.99))

    for epoch in range(40):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device="cuda")
        for x, y in loader:
            out = net(x.float().cuda() / 127.5 - 1).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(out, y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0], device="cuda")

        if rank % 2 == 0:
            dist.all_reduce(total, group=teams[0][1])
        else:
            dist.all_reduce(total, group=teams[1][1])
        if rank == members[0]:
            print(f"critic {name} epoch {epoch}: {(total[0] / total[1]).item():.4f}", flush=True)
            torch.save(net.module.state_dict(), f"critic_{name}.pt")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
