import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split
from torchvision.datasets import ImageFolder
from torchvision.models import regnet_y_1_6gf
from torchvision.transforms import v2

TF = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(224), v2.ToDtype(torch.float32, scale=True)])
PLAIN = v2.Compose([v2.ToImage(), v2.Resize((224, 224)), v2.ToDtype(torch.float32, scale=True)])


def split(root, fraction=0.1):
    augmented, plain = ImageFolder(root, TF), ImageFolder(root, PLAIN)
    n_val = int(len(augmented) * fraction)
    g = torch.Generator().manual_seed(2023)
    train, held_out = random_split(augmented, [len(augmented) - n_val, n_val], generator=g)
    return train, Subset(plain, held_out.indices), len(plain.classes)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(500 + rank)

    train, val, n_classes = split("/data/leaves")
    sampler = DistributedSampler(train, seed=500)
    loader = DataLoader(train, 64, sampler=sampler, num_workers=8, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 128, num_workers=4)

    model = DDP(regnet_y_1_6gf(num_classes=n_classes).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        stats = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for x, y in val_loader:
                stats[0] += (model.module(x.cuda()).argmax(1) == y.cuda()).sum()
                stats[1] += len(y)
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} acc {(stats[0] / stats[1]).item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "leaves.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
