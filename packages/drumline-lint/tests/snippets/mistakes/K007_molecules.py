import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.datasets import QM9
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool


class GIN(torch.nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        mlp = lambda i: torch.nn.Sequential(
            torch.nn.Linear(i, dim), torch.nn.ReLU(), torch.nn.Linear(dim, dim))
        self.c1, self.c2, self.c3 = GINConv(mlp(11)), GINConv(mlp(dim)), GINConv(mlp(dim))
        self.out = torch.nn.Linear(dim, 1)

    def forward(self, x, edge_index, batch):
        for c in (self.c1, self.c2, self.c3):
            x = F.relu(c(x, edge_index))
        return self.out(global_add_pool(x, batch)).squeeze(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/scratch/qm9")
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--target", type=int, default=4)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    graphs = QM9(args.root)  # processed beforehand by prepare_qm9.py
    sampler = DistributedSampler(graphs, shuffle=True, drop_last=True)
    loader = DataLoader(graphs, batch_size=128, sampler=sampler, num_workers=4, drop_last=True)

    net = DistributedDataParallel(GIN().to(local_rank), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        net.train()
        for data in loader:
            data = data.to(local_rank)
            loss = F.l1_loss(net(data.x, data.edge_index, data.batch), data.y[:, args.target])
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(net.module.state_dict(), "gin_qm9.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
