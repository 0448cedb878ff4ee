import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from ogb.nodeproppred import PygNodePropPredDataset
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv


class SAGE(torch.nn.Module):
    def __init__(self, cin, hid, cout, layers=3):
        super().__init__()
        dims = [cin] + [hid] * (layers - 1) + [cout]
        self.convs = torch.nn.ModuleList([SAGEConv(a, b) for a, b in zip(dims, dims[1:])])

    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = F.dropout(x.relu(), 0.5, self.training)
        return x


def shard(idx, rank, world):
    n = idx.numel() // world
    return idx[rank * n:(rank + 1) * n]


@torch.no_grad()
def accuracy(model, loader, rank):
    model.eval()
    ok = tot = 0
    for b in loader:
        b = b.to(rank)
        out = model(b.x, b.edge_index)[:b.batch_size]
        ok += int((out.argmax(-1) == b.y[:b.batch_size].view(-1)).sum())
        tot += b.batch_size
    return ok / tot


def run(rank, world, args, data, split, num_classes):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.manual_seed(7)

    kw = dict(num_neighbors=[15, 10, 5], batch_size=args.batch, num_workers=4, persistent_workers=True)
    train_loader = NeighborLoader(data, input_nodes=shard(split["train"], rank, world),
                                  shuffle=True, drop_last=True, **kw)
    val_loader = NeighborLoader(data, input_nodes=shard(split["valid"], rank, world), **kw)

    model = SAGE(data.num_features, args.hidden, num_classes).to(rank)
    model = DistributedDataParallel(model, device_ids=[rank])
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    best, bad = 0.0, 0
    for epoch in range(args.epochs):
        model.train()
        for b in train_loader:
            b = b.to(rank)
            opt.zero_grad()
            out = model(b.x, b.edge_index)[:b.batch_size]
            loss = F.cross_entropy(out, b.y[:b.batch_size].view(-1))
            loss.backward()
            opt.step()

        acc = accuracy(model.module, val_loader, rank)
        if rank == 0:
            print(f"Epoch {epoch:02d} loss {loss:.4f} val {acc:.4f}")
        if acc > best:
            best, bad = acc, 0
            if rank == 0:
                torch.save(model.module.state_dict(), "sage.pt")
        else:
            bad += 1
        if bad >= args.patience:
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--hidden", type=int, default=256)
    ap.add_argument("--batch", type=int, default=1024)
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--patience", type=int, default=8)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dataset = PygNodePropPredDataset("ogbn-products", root="/data/ogb")
    world = torch.cuda.device_count()
    mp.spawn(run, (world, args, dataset[0], dataset.get_idx_split(), dataset.num_classes), nprocs=world)
