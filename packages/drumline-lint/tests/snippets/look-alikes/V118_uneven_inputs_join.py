import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset

from chem.data import MoleculeGraphs, collate_graphs
from chem.model import GraphNet


def local_part(dataset, rank, world):
    by_size = sorted(range(len(dataset)), key=dataset.num_atoms)
    return Subset(dataset, by_size[rank::world])


def train_epoch(model, loader, optimizer, device):
    model.train()
    loss_sum = torch.zeros(2, device=device)
    with Join([model]):
        for graph, target in loader:
            loss = nn.functional.l1_loss(model(graph.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += torch.stack([loss.detach(), torch.ones_like(loss)])
    return loss_sum


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    part = local_part(MoleculeGraphs("/data/pcqm4m"), rank, world)
    gen = torch.Generator().manual_seed(100 + rank)
    batches = list(BatchSampler(SequentialSampler(part), 128, drop_last=False))
    model = DDP(GraphNet(hidden=512).to(device), device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    for epoch in range(100):
        order = torch.randperm(len(batches), generator=gen).tolist()
        loader = DataLoader(part, batch_sampler=[batches[i] for i in order],
                            collate_fn=collate_graphs, num_workers=4)
        loss_sum = train_epoch(model, loader, optimizer, device)
        dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"epoch {epoch}: {(loss_sum[0] / loss_sum[1]).item():.4f}")
            torch.save(model.module.state_dict(), "graphnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
