import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from seismic import Picker, Traces


def main():
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    world_size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    local_rank = int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    data = Traces("/shared/traces")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=4)
    model = DistributedDataParallel(Picker().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        for trace, pick in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(trace.cuda()), pick.cuda()).backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "/shared/picker.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
