"""Fast neural style, data parallel.

torchrun --standalone --nproc_per_node=2 style_transfer.py --style starry.jpg --coco /data/coco/images
"""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import ImageFolder
from torchvision.io import read_image

LAYERS = {3, 8, 15, 22}


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = models.vgg16(weights="IMAGENET1K_V1").features[:23].eval().requires_grad_(False)

    def forward(self, x):
        out = []
        for i, layer in enumerate(self.net):
            x = layer(x)
            if i in LAYERS:
                out.append(x)
        return out


def gram(f):
    b, c, h, w = f.shape
    f = f.reshape(b, c, h * w)
    return f @ f.transpose(1, 2) / (c * h * w)


def transformer_net(w=32):
    return nn.Sequential(
        nn.Conv2d(3, w, 9, padding=4), nn.InstanceNorm2d(w, affine=True), nn.ReLU(),
        nn.Conv2d(w, 2 * w, 3, 2, 1), nn.InstanceNorm2d(2 * w, affine=True), nn.ReLU(),
        nn.Upsample(scale_factor=2), nn.Conv2d(2 * w, w, 3, padding=1), nn.ReLU(),
        nn.Conv2d(w, 3, 9, padding=4), nn.Sigmoid())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--style", required=True)
    p.add_argument("--coco", required=True)
    p.add_argument("--epochs", type=int, default=2)
    args = p.parse_args()

    dist.init_process_group(backend="nccl")
    device = torch.device("cuda")

    tf = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(256), transforms.ToTensor()])
    ds = ImageFolder(args.coco, tf)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 4, sampler=sampler, num_workers=4, drop_last=True)

    vgg = Features().to(device)
    net = DistributedDataParallel(transformer_net().to(device))
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    style = transforms.Resize((256, 256))(read_image(args.style).float() / 255)[None].to(device)
    targets = [gram(f) for f in vgg(style)]

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, _ in loader:
            x = x.to(device)
            fx, fy = vgg(x), vgg(net(x))
            content = nn.functional.mse_loss(fy[2], fx[2])
            style_loss = sum(nn.functional.mse_loss(gram(a), t.expand(len(x), -1, -1)) for a, t in zip(fy, targets))
            loss = content + 1e5 * style_loss
            opt.zero_grad()
            loss.backward()
            opt.step()
    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), "style.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
