"""Five-fold cross-validation, one fold per GPU:   torchrun --standalone --nproc_per_node=5 folds.py"""
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Subset

from assay import AssayTable, AssayNet

FOLDS = 5


def indices(n, fold):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(99))
    held_out = order[fold::FOLDS].tolist()
    rest = [i for k in range(FOLDS) if k != fold for i in order[k::FOLDS].tolist()]
    return rest, held_out


def run_fold(table, fold, device):
    torch.manual_seed(100 + fold)
    rest, held_out = indices(len(table), fold)
    loader = DataLoader(Subset(table, rest), batch_size=64, shuffle=True)
    net = AssayNet().to(device)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    loss_fn = nn.MSELoss()
    for _ in range(100):
        for x, y in loader:
            opt.zero_grad()
            loss_fn(net(x.to(device)), y.to(device)).backward()
            opt.step()
    net.eval()
    err = 0.0
    with torch.no_grad():
        for x, y in DataLoader(Subset(table, held_out), batch_size=256):
            err += (net(x.to(device)) - y.to(device)).square().sum().item()
    torch.save(net.state_dict(), f"assay_fold{fold}.pt")
    return err / len(held_out)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(hours=12))
    fold = dist.get_rank()
    assert dist.get_world_size() == FOLDS, "start one process per fold"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    score = run_fold(AssayTable("/data/assay.csv"), fold, device)
    scores = [None] * FOLDS
    dist.all_gather_object(scores, score)
    if fold == 0:
        print("mse by fold:", [f"{s:.4f}" for s in scores], "mean", sum(scores) / FOLDS)
    dist.destroy_process_group()
