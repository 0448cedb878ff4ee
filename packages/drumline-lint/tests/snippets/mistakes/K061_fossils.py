import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T

WEIGHTS = "/models/regnet_y_8gf.pth"


def build(classes):
    net = torchvision.models.regnet_y_8gf()
    net.load_state_dict(torch.load(WEIGHTS, map_location="cpu"))
    net.fc = nn.Linear(net.fc.in_features, classes)
    for name, p in net.named_parameters():
        p.requires_grad = name.startswith("fc.")
    return net


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    tf = T.Compose([T.RandomResizedCrop(256), T.RandomHorizontalFlip(), T.ToTensor()])
    ds = torchvision.datasets.ImageFolder("/data/fossils/train", tf)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 48, sampler=sampler, num_workers=6, drop_last=True)
    model = DDP(build(len(ds.classes)).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.module.fc.parameters(), lr=1e-3)
    for epoch in range(20):
        if epoch == 5:
            for p in model.parameters():
                p.requires_grad = True
            opt = torch.optim.AdamW(model.parameters(), lr=5e-5)
        sampler.set_epoch(epoch)
        model.train()
        for img, y in loader:
            loss = nn.functional.cross_entropy(model(img.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "fossils.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
