import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import efficientnet_b0

SEED = 2024


def setup():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(SEED + dist.get_rank())
    return local_rank


def build_loaders(root, batch):
    tfm = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()])
    full = ImageFolder(root, tfm)
    n_val = len(full) // 10
    train, val = random_split(full, [len(full) - n_val, n_val])
    ts = DistributedSampler(train, seed=SEED)
    vs = DistributedSampler(val, shuffle=False)
    return (DataLoader(train, batch, sampler=ts, num_workers=6, drop_last=True),
            DataLoader(val, batch, sampler=vs, num_workers=6), ts)


def main():
    local_rank = setup()
    train_loader, val_loader, sampler = build_loaders("/data/skin_lesions", 64)
    model = DDP(efficientnet_b0(num_classes=7).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(60):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        hits = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for x, y in val_loader:
                hits[0] += (model(x.cuda()).argmax(1) == y.cuda()).sum()
                hits[1] += y.numel()
        dist.all_reduce(hits)
        if dist.get_rank() == 0:
            print(f"{epoch}: val acc {(hits[0] / hits[1]).item():.4f}")
            torch.save(model.module.state_dict(), "lesions.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
