import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, d=64, classes=12):
        super().__init__()
        self.rnn = nn.GRU(d, 256, batch_first=True)
        self.out = nn.Linear(256, classes)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def save_checkpoint(path, net, optimizer, epoch):
    tmp = f"{path}.tmp"
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, tmp)
    os.replace(tmp, path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="gestures.pt")
    ap.add_argument("--ckpt", default="gestures_last.pt")
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)

    blob = torch.load(args.data, map_location="cpu", weights_only=True)
    ds = TensorDataset(blob["x"], blob["y"])
    sampler = DistributedSampler(ds, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(ds, 128, sampler=sampler, num_workers=2, pin_memory=True, drop_last=True)
    model = DDP(Net().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            save_checkpoint(args.ckpt, model.module, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
