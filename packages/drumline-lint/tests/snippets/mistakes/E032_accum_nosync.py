import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import VOCSegmentation
from torchvision.models.segmentation import deeplabv3_resnet101

ACCUM = 4
ITERS_PER_LOG = 20


class PairTransform:
    def __init__(self, size=512):
        self.img = transforms.Compose([
            transforms.Resize((size, size)), transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
        self.mask = transforms.Compose([
            transforms.Resize((size, size), transforms.InterpolationMode.NEAREST),
            transforms.PILToTensor()])

    def __call__(self, img, mask):
        return self.img(img), self.mask(mask).squeeze(0).long()


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    ds = VOCSegmentation("/data/voc", image_set="train", transforms=PairTransform())
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, 4, sampler=sampler, num_workers=6, drop_last=True)

    net = deeplabv3_resnet101(num_classes=21, aux_loss=False).cuda()
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net = DDP(net, device_ids=[local])
    opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    ce = torch.nn.CrossEntropyLoss(ignore_index=255)

    for epoch in range(50):
        sampler.set_epoch(epoch)
        net.train()
        opt.zero_grad()
        for i, (x, y) in enumerate(loader):
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            ctx = net.no_sync() if ACCUM > 1 else nullcontext()
            with ctx:
                loss = ce(net(x)["out"], y) / ACCUM
                loss.backward()
            if (i + 1) % ACCUM == 0:
                opt.step()
                opt.zero_grad()
            if rank == 0 and i % ITERS_PER_LOG == 0:
                print(f"{epoch} {i} {loss.item() * ACCUM:.4f}")

    if rank == 0:
        torch.save(net.module.state_dict(), "deeplab_voc.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
