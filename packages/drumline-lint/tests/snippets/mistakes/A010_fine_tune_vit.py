import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms


def loaders(root, batch):
    norm = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    train_tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor(), norm])
    val_tf = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224),
                                 transforms.ToTensor(), norm])
    train = torchvision.datasets.ImageFolder(f"{root}/train", train_tf)
    val = torchvision.datasets.ImageFolder(f"{root}/val", val_tf)
    ts = DistributedSampler(train, shuffle=True, drop_last=True)
    vs = DistributedSampler(val, shuffle=False)
    return (DataLoader(train, batch, sampler=ts, num_workers=8, pin_memory=True, drop_last=True),
            DataLoader(val, batch, sampler=vs, num_workers=8, pin_memory=True), ts)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = total = 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        pred = model(x).argmax(dim=1)
        correct += (pred == y).sum().item()
        total += y.numel()
    return 100.0 * correct / total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("root")
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=10)
    args = ap.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(11 + dist.get_rank())

    train_loader, val_loader, train_sampler = loaders(args.root, args.batch)
    model = torchvision.models.vit_b_16(num_classes=100).to(device)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        acc = evaluate(model, val_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: val top-1 {acc:.2f}%")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "vit.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
