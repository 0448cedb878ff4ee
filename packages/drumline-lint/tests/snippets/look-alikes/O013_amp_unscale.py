import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from flow.data import Sintel
from flow.raft import RAFT, sequence_loss

CKPT = "raft.pt"


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dev = f"cuda:{local_rank}"
    ds = Sintel("/data/sintel")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 3, sampler=sampler, num_workers=4, drop_last=True)
    net = RAFT().to(dev)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    first = 0
    if os.path.isfile(CKPT):
        s = torch.load(CKPT, map_location=dev)
        net.load_state_dict(s["net"])
        opt.load_state_dict(s["opt"])
        scaler.load_state_dict(s["scaler"])
        first = s["epoch"] + 1
    model = DDP(net, device_ids=[local_rank])
    for epoch in range(first, 60):
        sampler.set_epoch(epoch)
        model.train()
        for a, b, gt in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = sequence_loss(model(a.to(dev), b.to(dev)), gt.to(dev))
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
        if rank == 0:
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(),
                        "scaler": scaler.state_dict(), "epoch": epoch}, CKPT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
