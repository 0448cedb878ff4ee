"""Learned fluid simulator on meshes; can be stopped and continued exactly."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from meshflow import FlowSteps, MeshNet

RUN = "/ckpt/meshflow"


def save(epoch, model, optimizer, rank):
    rng = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}
    torch.save(rng, f"{RUN}/rng_rank{rank:03d}.pt")
    if rank == 0:
        torch.save({"epoch": epoch, "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict()}, f"{RUN}/model.pt")
    dist.barrier()


def load(model, optimizer, rank):
    if not os.path.exists(f"{RUN}/model.pt"):
        return 0
    state = torch.load(f"{RUN}/model.pt", map_location="cpu")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    rng = torch.load(f"{RUN}/rng_rank{rank:03d}.pt", map_location="cpu")
    torch.set_rng_state(rng["cpu"])
    torch.cuda.set_rng_state(rng["cuda"])
    return state["epoch"] + 1


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    os.makedirs(RUN, exist_ok=True)
    torch.manual_seed(100 + rank)

    data = FlowSteps("/data/airfoil")
    sampler = DistributedSampler(data, seed=100)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(MeshNet().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    for epoch in range(load(model, optimizer, rank), 40):
        sampler.set_epoch(epoch)
        for state, target in loader:
            state, target = state.cuda(), target.cuda()
            noisy = state + 0.003 * torch.randn_like(state)
            loss = F.mse_loss(model(noisy), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3e}", flush=True)
        save(epoch, model, optimizer, rank)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
