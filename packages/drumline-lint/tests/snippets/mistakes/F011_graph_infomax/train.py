import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool


class Encoder(nn.Module):
    def __init__(self, in_dim=28, hidden=256, layers=4):
        super().__init__()
        self.embed = nn.Linear(in_dim, hidden)
        self.convs = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden)))
            for _ in range(layers)
        )
        self.bilinear = nn.Linear(hidden, hidden, bias=False)

    def encode(self, x, edge_index):
        h = self.embed(x)
        for conv in self.convs:
            h = F.relu(conv(h, edge_index))
        return h

    def forward(self, x, edge_index, batch):
        pos = self.encode(x, edge_index)
        neg = self.encode(x[torch.randperm(x.size(0), device=x.device)], edge_index)
        summary = torch.sigmoid(global_add_pool(pos, batch))[batch]
        score = lambda h: (self.bilinear(h) * summary).sum(-1)
        return score(pos), score(neg)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--graphs", required=True)
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--batch-size", type=int, default=256)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    graphs = torch.load(args.graphs, map_location="cpu")
    sampler = DistributedSampler(graphs, shuffle=True, seed=7)
    loader = DataLoader(graphs, batch_size=args.batch_size, sampler=sampler, num_workers=6)
    model = DDP(Encoder().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for data in loader:
            data = data.to(local_rank)
            pos, neg = model(data.x, data.edge_index, data.batch)
            loss = F.binary_cross_entropy_with_logits(pos, torch.ones_like(pos))
            loss = loss + F.binary_cross_entropy_with_logits(neg, torch.zeros_like(neg))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch:03d} loss {loss.item():.4f}")
            torch.save(model.module.state_dict(), "dgi.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
