import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from nerf.data import MultiSceneRays
from nerf.model import PixelNeRF, photometric


def main(epochs=60):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    rays = MultiSceneRays("/data/dtu", split="train")
    sampler = DistributedSampler(rays, drop_last=True)
    loader = DataLoader(rays, batch_size=4, sampler=sampler, num_workers=6, pin_memory=True)
    model = DDP(PixelNeRF().cuda(), device_ids=[local_rank])
    optim = torch.optim.Adam(model.parameters(), lr=1e-4)

    step = skipped = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            rgb = model(batch["images"], batch["rays"])
            loss = photometric(rgb, batch["rgb"])

            ok = torch.isfinite(loss.detach()).to(torch.int32)
            dist.all_reduce(ok, op=dist.ReduceOp.MIN)
            if ok.item() == 0:
                skipped += 1
                if skipped > 50:
                    raise RuntimeError(f"more than 50 bad batches by step {step}")
                continue

            optim.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            step += 1
            if rank == 0 and step % 250 == 0:
                print(f"step {step} loss {loss.item():.5f} skipped {skipped}")
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "pixelnerf.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
