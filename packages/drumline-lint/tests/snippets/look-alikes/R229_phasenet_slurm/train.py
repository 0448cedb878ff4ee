import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from seismic.data import Picks
from seismic.phasenet import PhaseNet


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--h5", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--batch", type=int, default=512)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()

    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    assert torch.cuda.device_count() == 1, "start with srun --gpus-per-task=1"
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world)

    ds = Picks(args.h5, split="train")
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(ds, args.batch, sampler=sampler, num_workers=10, pin_memory=True, drop_last=True)
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(PhaseNet()).to(device)
    model = DDP(net, device_ids=[0])
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for wave, prob in loader:
            logits = model(wave.to(device, non_blocking=True))
            loss = F.cross_entropy(logits, prob.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(net.state_dict(), os.path.join(args.out, "phasenet.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
