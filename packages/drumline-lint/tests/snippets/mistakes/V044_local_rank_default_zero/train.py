import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from vae import ConvVAE


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--data", required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    torch.cuda.set_device(args.local_rank)
    dist.init_process_group("nccl")
    tfm = transforms.Compose([transforms.CenterCrop(178), transforms.Resize(64), transforms.ToTensor()])
    dataset = ImageFolder(args.data, tfm)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=4)
    model = DDP(ConvVAE().cuda(), device_ids=[args.local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, _ in loader:
            loss = model(x.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"{args.out}/vae.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
