import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from qmforces import Frames, PaiNN


def any_rank(flag, device):
    t = torch.tensor(int(flag), device=device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return bool(t.item())


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    frames = Frames("/data/md22")
    sampler = DistributedSampler(frames, shuffle=True)
    loader = DataLoader(frames, batch_size=16, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(PaiNN(width=256).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, amsgrad=True)

    for epoch in range(300):
        sampler.set_epoch(epoch)
        skipped = 0
        for positions, species, forces in loader:
            positions, species = positions.to(device), species.to(device)
            loss = F.mse_loss(model(positions, species), forces.to(device))

            if any_rank(not torch.isfinite(loss), device):
                skipped += 1
                optimizer.zero_grad(set_to_none=True)
                continue

            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: skipped {skipped} of {len(loader)}", flush=True)
            torch.save(model.module.state_dict(), "/ckpt/painn.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
