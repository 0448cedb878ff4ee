import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from captioner import CaptionModel, Captions


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    data = Captions("/shared/coco")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=48, sampler=sampler, num_workers=6)
    model = DistributedDataParallel(CaptionModel().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(15):
        sampler.set_epoch(epoch)
        for image, tokens in loader:
            optimizer.zero_grad()
            model(image.cuda(), tokens.cuda()).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "/shared/captioner/last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
