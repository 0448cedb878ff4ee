import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.datasets import Reddit
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv


class SAGE(torch.nn.Module):
    def __init__(self, cin, hidden, cout, layers=2):
        super().__init__()
        dims = [cin] + [hidden] * (layers - 1) + [cout]
        self.convs = torch.nn.ModuleList(SAGEConv(a, b) for a, b in zip(dims[:-1], dims[1:]))

    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = F.dropout(F.relu(x), 0.5, self.training)
        return x


def broadcast_params(model):
    for t in list(model.parameters()) + list(model.buffers()):
        dist.broadcast(t.data, src=0)


def sync_gradients(model):
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    for g, f in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
        g.copy_(f)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/reddit")
    ap.add_argument("--hidden", type=int, default=256)
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--lr", type=float, default=0.003)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    if rank == 0:
        Reddit(args.root)
    dist.barrier()
    data = Reddit(args.root)[0]
    train_idx = data.train_mask.nonzero().view(-1)
    per_rank = train_idx.numel() // world
    g = torch.Generator().manual_seed(12345)
    perm = train_idx[torch.randperm(train_idx.numel(), generator=g)]
    mine = perm[rank * per_rank:(rank + 1) * per_rank]
    loader = NeighborLoader(data, num_neighbors=[25, 10], input_nodes=mine, batch_size=1024,
                            shuffle=True, drop_last=True, num_workers=4)

    model = SAGE(data.num_features, args.hidden, int(data.y.max()) + 1).to(device)
    broadcast_params(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        model.train()
        total = torch.zeros(2, device=device)
        for batch in loader:
            batch = batch.to(device)
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            opt.zero_grad()
            loss.backward()
            sync_gradients(model)
            opt.step()
            total += torch.stack([loss.detach() * batch.batch_size, torch.tensor(float(batch.batch_size), device=device)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch:02d} loss {(total[0] / total[1]).item():.4f}", flush=True)

    if rank == 0:
        torch.save(model.state_dict(), "sage_reddit.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
