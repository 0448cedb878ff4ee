import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ogb.graphproppred import PygGraphPropPredDataset
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, global_mean_pool
from ogb.graphproppred.mol_encoder import AtomEncoder


class Net(torch.nn.Module):
    def __init__(self, dim=300, tasks=128):
        super().__init__()
        self.atoms = AtomEncoder(dim)
        self.gnn = GIN(dim, dim, num_layers=5, dropout=0.5)
        self.out = torch.nn.Linear(dim, tasks)

    def forward(self, data):
        h = self.gnn(self.atoms(data.x), data.edge_index)
        return self.out(global_mean_pool(h, data.batch))


def main():
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    device = torch.device("cuda:0")  # run_task.sh leaves one GPU visible
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world)

    dataset = PygGraphPropPredDataset("ogbg-molpcba", root="data")  # downloaded on the login node
    train = dataset[dataset.get_idx_split()["train"]]
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=256, sampler=sampler, num_workers=6)

    model = DDP(Net().to(device), device_ids=[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for data in loader:
            data = data.to(device)
            known = ~torch.isnan(data.y)
            loss = F.binary_cross_entropy_with_logits(model(data)[known], data.y[known])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "gin_pcba.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
