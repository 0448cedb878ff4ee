import argparse
import logging
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = logging.getLogger("forecast")


class Windows(Dataset):
    def __init__(self, path, context, horizon, split):
        series = np.load(path, mmap_mode="r")
        cut = int(0.9 * len(series))
        self.x = series[:cut] if split == "train" else series[cut:]
        self.context, self.horizon = context, horizon

    def __len__(self):
        return len(self.x) - self.context - self.horizon

    def __getitem__(self, i):
        w = torch.from_numpy(np.array(self.x[i:i + self.context + self.horizon], dtype=np.float32))
        return w[: self.context], w[self.context:]


class PatchForecaster(nn.Module):
    def __init__(self, channels, context, horizon, patch=16, d=256):
        super().__init__()
        self.patch, self.horizon, self.channels = patch, horizon, channels
        self.inp = nn.Linear(patch * channels, d)
        layer = nn.TransformerEncoderLayer(d, 8, 4 * d, 0.1, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(d * (context // patch), horizon * channels)

    def forward(self, x):
        b = x.size(0)
        mu, sd = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        z = ((x - mu) / sd).reshape(b, -1, self.patch * self.channels)
        y = self.out(self.enc(self.inp(z)).flatten(1)).view(b, self.horizon, self.channels)
        return y * sd + mu


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    abs_err, sq_err, count = 0.0, 0.0, 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        diff = model(x) - y
        abs_err += diff.abs().sum().item()
        sq_err += diff.pow(2).sum().item()
        count += diff.numel()
    totals = torch.tensor([abs_err, sq_err, count], dtype=torch.float64)
    dist.all_reduce(totals, op=dist.ReduceOp.SUM)
    mae = totals[0] / totals[2]
    rmse = (totals[1] / totals[2]).sqrt()
    return mae.item(), rmse.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--series", default="electricity.npy")
    ap.add_argument("--context", type=int, default=512)
    ap.add_argument("--horizon", type=int, default=96)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--lr", type=float, default=5e-4)
    ap.add_argument("--out", default="forecaster.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    train = Windows(args.series, args.context, args.horizon, "train")
    val = Windows(args.series, args.context, args.horizon, "val")
    ts, vs = DistributedSampler(train), DistributedSampler(val, shuffle=False, drop_last=True)
    tl = DataLoader(train, args.batch, sampler=ts, num_workers=4, pin_memory=True)
    vl = DataLoader(val, args.batch, sampler=vs, num_workers=4)

    model = DDP(PatchForecaster(train.x.shape[1], args.context, args.horizon).to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    best = float("inf")
    for epoch in range(args.epochs):
        ts.set_epoch(epoch)
        model.train()
        for x, y in tl:
            loss = nn.functional.l1_loss(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        mae, rmse = evaluate(model, vl, device)
        log.info("epoch %d mae %.4f rmse %.4f", epoch, mae, rmse)
        if rank == 0 and mae < best:
            best = mae
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
