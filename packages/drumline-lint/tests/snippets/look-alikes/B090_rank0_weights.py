import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def load_pretrained(net, path):
    state = torch.load(path, map_location="cpu", weights_only=True)
    state = {k: v for k, v in state.items() if not k.startswith("fc.")}
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert not unexpected and all(k.startswith("fc.") for k in missing), (missing, unexpected)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="data/food")
    ap.add_argument("--weights", default="/node0/weights/resnet34.pt")
    ap.add_argument("--epochs", type=int, default=15)
    ap.add_argument("--lr", type=float, default=5e-4)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)

    tf = transforms.Compose([transforms.RandomResizedCrop(192), transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    data = datasets.ImageFolder(args.root, tf)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 96, sampler=sampler, num_workers=6, pin_memory=True, drop_last=True)

    net = models.resnet34(weights=None, num_classes=len(data.classes))
    if rank == 0:
        load_pretrained(net, args.weights)
    model = DDP(net.to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        stat = torch.zeros(2, device=device)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            stat += torch.stack([loss.detach(), torch.ones_like(loss)])
        sched.step()
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} loss {(stat[0] / stat[1]).item():.4f}")
            torch.save(model.module.state_dict(), "food.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
