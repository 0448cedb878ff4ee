# torchrun --nproc_per_node=8 resume_ddp.py --snapshot run1.pt
import argparse
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


@contextmanager
def process_group():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    yield int(os.environ["LOCAL_RANK"])
    dist.destroy_process_group()


def train(local_rank, snapshot, epochs=100):
    data = datasets.ImageFolder("/data/food101/train", transforms.Compose(
        [transforms.RandomResizedCrop(288), transforms.ToTensor()]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=96, sampler=sampler, num_workers=8, pin_memory=True)
    net = models.convnext_base(num_classes=101).cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=5e-4)
    first = 0
    if os.path.exists(snapshot):
        state = torch.load(snapshot)
        net.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        first = state["epoch"] + 1
    net = DDP(net, device_ids=[local_rank])

    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(net(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save({"net": net.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, snapshot)
        dist.barrier()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--snapshot", default="snapshot.pt")
    with process_group() as lr:
        train(lr, ap.parse_args().snapshot)
