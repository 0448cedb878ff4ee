import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from solar.data import MagnetogramPairs
from solar.unet import UNet


def write_stats(data_dir, path):
    files = sorted(f for f in os.listdir(data_dir) if f.endswith(".npy"))
    sample = np.stack([np.load(os.path.join(data_dir, f), mmap_mode="r")[::4, ::4] for f in files[::50]])
    x = torch.from_numpy(sample.astype("float32"))
    torch.save({"mean": x.mean(), "std": x.std(), "max": x.abs().max()}, path)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--init", default=None, help="pretrained weights")
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--batch", type=int, default=8)
    args = p.parse_args()

    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    stats_path = os.path.join(args.out, "stats.pt")
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        if not os.path.exists(stats_path):
            write_stats(args.data, stats_path)
    dist.barrier()
    stats = torch.load(stats_path)

    ds = MagnetogramPairs(args.data, mean=stats["mean"].item(), std=stats["std"].item())
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, args.batch, sampler=sampler, num_workers=6, pin_memory=True, drop_last=True)
    net = UNet(1, 1).to(device)
    if args.init:
        net.load_state_dict(torch.load(args.init, map_location=device, weights_only=True))
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.l1_loss(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} l1 {loss.item():.4f}", flush=True)
            torch.save(net.state_dict(), os.path.join(args.out, "unet.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
