import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("tremor")


def train(local_rank):
    d = torch.load("/data/quakes.pt", map_location="cpu")
    ds = TensorDataset(d["trace"].float(), d["arrival"].float())
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 256, sampler=sampler, num_workers=4, drop_last=True)
    net = nn.Sequential(nn.Conv1d(3, 32, 11, 4), nn.ReLU(), nn.Conv1d(32, 64, 7, 4), nn.ReLU(),
                        nn.Flatten(), nn.LazyLinear(1))
    net = net.cuda()
    net(torch.zeros(2, *d["trace"].shape[1:], device="cuda"))
    net = DDP(net, device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for x, t in loader:
            loss = nn.functional.huber_loss(net(x.cuda()).squeeze(1), t.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            log.info("epoch %d done", epoch)
            torch.save(net.module.state_dict(), "picker.pt")


@record
def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    try:
        train(local_rank)
    except Exception:
        log.exception("rank %d failed", dist.get_rank())
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
