import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from claims import ClaimNet, Claims

stop = False


def on_term(signum, frame):
    global stop
    stop = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ckpt-dir", required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, on_term)

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    data = Claims("/data/claims")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=512, sampler=sampler, num_workers=4)
    model = DistributedDataParallel(ClaimNet().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(50):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
            asked = torch.tensor(int(stop), device="cuda")
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
            if asked.item():
                break
        if dist.get_rank() == 0:
            state = {"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, os.path.join(args.ckpt_dir, "last.pt"))
        if asked.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
