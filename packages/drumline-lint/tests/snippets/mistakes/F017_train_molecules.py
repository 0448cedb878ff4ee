import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.datasets import QM9
from torch_geometric.loader import DataLoader
from torch_geometric.nn import NNConv, Set2Set


class MPNN(nn.Module):
    def __init__(self, node_dim=11, edge_dim=5, dim=64):
        super().__init__()
        self.lin0 = nn.Linear(node_dim, dim)
        edge_net = nn.Sequential(nn.Linear(edge_dim, 128), nn.ReLU(), nn.Linear(128, dim * dim))
        self.conv = NNConv(dim, dim, edge_net, aggr="mean")
        self.gru = nn.GRU(dim, dim)
        self.pool = Set2Set(dim, processing_steps=3)
        self.out = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, data):
        x = F.relu(self.lin0(data.x))
        h = x.unsqueeze(0)
        for _ in range(3):
            m = F.relu(self.conv(x, data.edge_index, data.edge_attr))
            x, h = self.gru(m.unsqueeze(0), h)
            x = x.squeeze(0)
        return self.out(self.pool(x, data.batch)).view(-1)


def evaluate(model, loader, std, device):
    model.eval()
    total = torch.zeros(2, device=device, dtype=torch.double)
    with torch.no_grad():
        for data in loader:
            data = data.to(device)
            total[0] += (model(data) * std - data.y[:, 0] * std).abs().sum()
            total[1] += data.num_graphs
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data/QM9")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--ckpt", default="mpnn_qm9.pt")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    if dist.get_rank() == 0:
        QM9(args.root)
    dist.barrier()
    dataset = QM9(args.root)
    mean, std = dataset.data.y[:, 0].mean(), dataset.data.y[:, 0].std()
    dataset.data.y = (dataset.data.y - mean) / std
    train_set, val_set = dataset[10000:], dataset[:10000]
    sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=64, sampler=sampler, num_workers=4)
    val_loader = DataLoader(val_set, batch_size=256, sampler=DistributedSampler(val_set, shuffle=False))

    model = DistributedDataParallel(MPNN().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for data in train_loader:
            data = data.to(device)
            loss = F.mse_loss(model(data), data.y[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mae = evaluate(model, val_loader, std.to(device), device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch:03d} val MAE {mae:.4f}", flush=True)
        if mae < best:
            best = mae
            torch.save({"model": model.module.state_dict(), "epoch": epoch, "mae": mae}, args.ckpt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
