import os

os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]

import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

DEVICE = torch.device("cuda", 0)


class Go(Dataset):
    """Board positions with the move played and the winner."""

    def __init__(self, path):
        blob = torch.load(path, map_location="cpu", mmap=True)
        self.boards, self.moves, self.wins = blob["boards"], blob["moves"], blob["wins"]

    def __len__(self):
        return len(self.moves)

    def __getitem__(self, i):
        board, move = self.boards[i].float(), int(self.moves[i])
        k = random.randrange(4)
        board = torch.rot90(board, k, (1, 2))
        if move < 361:
            grid = torch.zeros(19, 19)
            grid[move // 19, move % 19] = 1
            move = int(torch.rot90(grid, k, (0, 1)).flatten().argmax())
        return board, move, self.wins[i].float()


class Tower(nn.Module):
    def __init__(self, planes=17, ch=128, blocks=10):
        super().__init__()
        self.stem = nn.Conv2d(planes, ch, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(ch, ch, 3, padding=1), nn.GroupNorm(8, ch), nn.ReLU(),
                          nn.Conv2d(ch, ch, 3, padding=1), nn.GroupNorm(8, ch)) for _ in range(blocks))
        self.policy = nn.Sequential(nn.Conv2d(ch, 2, 1), nn.Flatten(), nn.Linear(722, 362))
        self.value = nn.Sequential(nn.Conv2d(ch, 1, 1), nn.Flatten(), nn.Linear(361, 1))

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = torch.relu(x + b(x))
        return self.policy(x), self.value(x).squeeze(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--games", default="kgs.pt")
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--bs", type=int, default=512)
    ap.add_argument("--out", default="go.pt")
    args = ap.parse_args()

    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    ds = Go(args.games)
    sampler = DistributedSampler(ds)
    dl = DataLoader(ds, args.bs, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(Tower().to(DEVICE), device_ids=[0])
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (board, move, win) in enumerate(dl):
            p, v = model(board.to(DEVICE, non_blocking=True))
            loss = nn.functional.cross_entropy(p, move.to(DEVICE))
            loss = loss + nn.functional.binary_cross_entropy_with_logits(v, win.to(DEVICE))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if rank == 0 and i % 100 == 0:
                print(f"{epoch} {i}/{len(dl)} {loss.item():.4f}", flush=True)
        if rank == 0:
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
