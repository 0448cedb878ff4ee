import os
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from segm.ade import ADE20K
from segm.segformer import SegFormerB2


def newest(folder):
    names = [n for n in os.listdir(folder) if re.fullmatch(r"ep\d+\.pth", n)]
    return max(names, key=lambda n: int(n[2:-4]), default=None)


def restore(folder, net, optim):
    name = newest(folder)
    if name is None:
        return 0
    blob = torch.load(os.path.join(folder, name), map_location="cpu")
    weights = {k.removeprefix("module."): v for k, v in blob["net"].items()}
    net.load_state_dict(weights)
    optim.load_state_dict(blob["optim"])
    return blob["epoch"] + 1


def main(folder="/shared/segformer", epochs=160):
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    os.makedirs(folder, exist_ok=True)

    net = SegFormerB2(num_classes=150).cuda()
    optim = torch.optim.AdamW(net.parameters(), lr=6e-5, weight_decay=0.01)
    first = restore(folder, net, optim)
    dist.barrier()
    net = DDP(net, device_ids=[gpu])

    ds = ADE20K("training")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 4, sampler=sampler, num_workers=4, drop_last=True)
    ce = nn.CrossEntropyLoss(ignore_index=255)

    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        net.train()
        for img, lab in loader:
            logits = net(img.cuda(non_blocking=True))
            logits = nn.functional.interpolate(logits, size=lab.shape[-2:], mode="bilinear")
            loss = ce(logits, lab.cuda(non_blocking=True))
            optim.zero_grad(set_to_none=True)
            loss.backward()
            optim.step()
        if dist.get_rank() == 0:
            torch.save({"net": net.state_dict(), "optim": optim.state_dict(), "epoch": epoch},
                       f"{folder}/ep{epoch}.pth")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
