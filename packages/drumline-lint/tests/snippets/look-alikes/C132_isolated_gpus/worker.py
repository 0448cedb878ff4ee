import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ads import AdDataset, WideDeep


def main():
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    data = AdDataset("/data/ads")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4096, sampler=sampler, num_workers=4)
    model = DistributedDataParallel(WideDeep().cuda(), device_ids=[device])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            logit = model(x.cuda())
            torch.nn.functional.binary_cross_entropy_with_logits(logit, y.cuda()).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "widedeep.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
