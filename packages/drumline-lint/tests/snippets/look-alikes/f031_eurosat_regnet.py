import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, random_split
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import EuroSAT
from torchvision.models import regnet_y_1_6gf

ROOT = os.environ.get("DATA_ROOT", "/data/eurosat")
SPLIT_SEED = 1234


def get_splits(rank):
    if rank == 0:
        EuroSAT(ROOT, download=True)
    dist.barrier()
    plain = T.Compose([T.Resize(128), T.ToTensor()])
    data = EuroSAT(ROOT, transform=plain)
    n_val = int(0.2 * len(data))
    return random_split(data, [len(data) - n_val, n_val], generator=torch.Generator().manual_seed(SPLIT_SEED))


def augment(x):
    """Random dihedral transform of the whole batch, on the GPU."""
    k = int(torch.randint(0, 4, (1,)))
    x = torch.rot90(x, k, dims=(2, 3))
    return x.flip(-1) if torch.rand(()) < 0.5 else x


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(99 + rank)

    train, val = get_splits(rank)
    sampler = DistributedSampler(train, shuffle=True)
    train_loader = DataLoader(train, 64, sampler=sampler, num_workers=4, drop_last=True)
    val_loader = DataLoader(val, 128, sampler=DistributedSampler(val, shuffle=False), num_workers=4)

    net = nn.SyncBatchNorm.convert_sync_batchnorm(regnet_y_1_6gf(num_classes=10)).cuda()
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=4)

    for epoch in range(60):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(augment(x.cuda(non_blocking=True))), y.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        counts = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for x, y in val_loader:
                counts[0] += (model(x.cuda()).argmax(1) == y.cuda()).sum()
                counts[1] += y.numel()
        dist.all_reduce(counts)
        acc = (counts[0] / counts[1]).item()
        scheduler.step(acc)
        if rank == 0:
            print(f"epoch {epoch} acc {acc:.4f}", flush=True)
            torch.save(model.module.state_dict(), "regnet_eurosat.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
