import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from bucketing import BucketBatches
from speech import Frames, Tagger, pad


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = Frames("/data/phones/train.pt")
    batches = BucketBatches(ds.lengths(), 24, dist.get_rank(), dist.get_world_size())
    loader = DataLoader(ds, batch_sampler=batches, collate_fn=pad, num_workers=4)
    net = DDP(Tagger().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=4e-4)
    for epoch in range(30):
        batches.epoch = epoch
        for x, y in loader:
            logits = net(x.cuda())
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), y.cuda().flatten(), ignore_index=-1)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(net.module.state_dict(), "phones.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
