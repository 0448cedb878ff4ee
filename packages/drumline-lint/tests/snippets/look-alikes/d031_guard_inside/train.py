"""Land cover segmentation."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import storage
from landcover.data import Tiles
from landcover.net import DeepLab


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--epochs", type=int, default=50)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    storage.open_run(args.out)

    net = DeepLab(classes=11).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-4)
    first = 0
    state = storage.load("state.pt", device)
    if state is not None:
        net.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        first = state["epoch"] + 1
    model = DDP(net, device_ids=[local])

    tiles = Tiles("/data/landcover", "train")
    sampler = DistributedSampler(tiles, shuffle=True)
    loader = DataLoader(tiles, 16, sampler=sampler, num_workers=6, drop_last=True)
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device=device)
        for img, mask in loader:
            loss = nn.functional.cross_entropy(model(img.to(device)), mask.to(device), ignore_index=255)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        storage.log(epoch=epoch, loss=total.item() / len(loader) / dist.get_world_size())
        storage.save("state.pt", {"net": net.state_dict(), "opt": opt.state_dict(), "epoch": epoch})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
