import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from molecules.data import QM9, collate
from molecules.model import EGNN


def any_rank(flag, device):
    t = torch.tensor([int(flag)], device=device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return bool(t.item())


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dev = torch.device("cuda", local_rank)
    ds = QM9("/data/qm9")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 96, sampler=sampler, collate_fn=collate, num_workers=2, drop_last=True)
    model = DDP(EGNN().to(dev), device_ids=[local_rank], broadcast_buffers=False)
    opt = torch.optim.Adam(model.parameters(), lr=5e-4)
    skipped = 0
    for epoch in range(300):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = batch.to(dev)
            loss = torch.nn.functional.l1_loss(model(batch), batch.y)
            if any_rank(not torch.isfinite(loss), dev):
                skipped += 1
                continue
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} skipped {skipped}")
            torch.save(model.module.state_dict(), "egnn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
