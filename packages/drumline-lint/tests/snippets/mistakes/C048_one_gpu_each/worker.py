import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from clicks import ClickDataset, DeepCross


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    dataset = ClickDataset("/data/criteo")
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8192, sampler=sampler, num_workers=4)
    model = DistributedDataParallel(DeepCross().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for features, label in loader:
            optimizer.zero_grad()
            logit = model(features.cuda())
            torch.nn.functional.binary_cross_entropy_with_logits(logit, label.cuda()).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "deepcross.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
