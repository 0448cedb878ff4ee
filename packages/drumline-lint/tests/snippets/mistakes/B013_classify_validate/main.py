import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

import comm
from dataset import ArrayDataset


def validate(net, loader, device):
    net.eval()
    correct, count = 0, 0
    with torch.no_grad():
        for x, y in loader:
            pred = net(x.to(device)).argmax(dim=1)
            correct += (pred == y.to(device)).sum().item()
            count += y.size(0)
    return correct / count


@comm.master_only
def save(net, path, acc):
    torch.save({"net": net.state_dict(), "acc": acc}, path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="data/har")
    ap.add_argument("--epochs", type=int, default=30)
    args = ap.parse_args()

    local_rank = comm.setup()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(5 + comm.rank())
    train_set = ArrayDataset(args.root, "train")
    val_set = ArrayDataset(args.root, "val")
    sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, 128, sampler=sampler, num_workers=2, drop_last=True)
    shard = Subset(val_set, range(comm.rank(), len(val_set), comm.world_size()))
    val_loader = DataLoader(shard, 256, num_workers=2)

    net = nn.Sequential(nn.Flatten(), nn.Linear(9 * 128, 512), nn.GELU(), nn.Linear(512, 6)).to(device)
    ddp = DistributedDataParallel(net, device_ids=[local_rank])
    opt = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in train_loader:
            loss = F.cross_entropy(ddp(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = validate(net, val_loader, device)
        if comm.is_primary():
            print(f"epoch {epoch}: val acc {acc:.4f}")
        if acc > best:
            best = acc
            save(net, "har_best.pt", acc)
    comm.teardown()


if __name__ == "__main__":
    main()
