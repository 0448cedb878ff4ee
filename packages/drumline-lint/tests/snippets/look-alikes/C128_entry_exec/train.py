import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from invoices import Invoices, LayoutNet


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ckpt-dir", required=True)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    data = Invoices("/data")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=4)
    model = DistributedDataParallel(LayoutNet().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for page, target in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(page.cuda()), target.cuda()).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            path = os.path.join(args.ckpt_dir, "last.pt")
            torch.save(model.module.state_dict(), path + ".tmp")
            os.replace(path + ".tmp", path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
