"""Node classification with mini-batches over seed nodes; early stopping on rank 0's verdict."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_geometric.datasets import Reddit
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE

ROOT = "data/Reddit"


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    if rank == 0:
        Reddit(ROOT)
    dist.barrier()
    data = Reddit(ROOT)[0]
    seeds = data.train_mask.nonzero().view(-1)
    per_rank = seeds.numel() // world
    seeds = seeds[rank * per_rank:(rank + 1) * per_rank]
    train_loader = NeighborLoader(data, [25, 10], input_nodes=seeds, batch_size=1024, shuffle=True,
                                  num_workers=6, persistent_workers=True)
    val_loader = None
    if rank == 0:
        val_loader = NeighborLoader(data, [25, 10], input_nodes=data.val_mask, batch_size=1024, num_workers=6)

    torch.manual_seed(12345)
    model = DDP(GraphSAGE(602, 256, 2, out_channels=41, dropout=0.5).to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    best, patience = 0.0, 0
    stop = torch.zeros(1, device=device)

    for epoch in range(1, 101):
        model.train()
        for batch in train_loader:
            batch = batch.to(device)
            out = model(batch.x, batch.edge_index)[:batch.batch_size]
            loss = F.cross_entropy(out, batch.y[:batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        if rank == 0:
            model.eval()
            hit = total = 0
            with torch.no_grad():
                for batch in val_loader:
                    batch = batch.to(device)
                    out = model.module(batch.x, batch.edge_index)[:batch.batch_size]
                    hit += int((out.argmax(-1) == batch.y[:batch.batch_size]).sum())
                    total += batch.batch_size
            acc = hit / total
            print(f"epoch {epoch:03d} val {acc:.4f}", flush=True)
            if acc > best:
                best, patience = acc, 0
                torch.save(model.module.state_dict(), "sage_reddit.pt")
            else:
                patience += 1
            stop.fill_(float(patience >= 10))
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
