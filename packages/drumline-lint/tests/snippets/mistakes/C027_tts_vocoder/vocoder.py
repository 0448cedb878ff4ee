import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from hifi import Generator, WavDataset, mel_loss

parser = argparse.ArgumentParser()
parser.add_argument("--wavs", required=True)
parser.add_argument("--run", required=True)
parser.add_argument("--local_rank", type=int, default=0)


def main():
    args = parser.parse_args()
    torch.cuda.set_device(args.local_rank)
    device = torch.device("cuda", args.local_rank)
    dist.init_process_group("nccl")
    os.makedirs(args.run, exist_ok=True)

    net = DistributedDataParallel(Generator().to(device), device_ids=[args.local_rank])
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-4, betas=(0.8, 0.99))
    dataset = WavDataset(args.wavs, segment=8192)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=4, drop_last=True)

    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for mel, wav in loader:
            optimizer.zero_grad(set_to_none=True)
            mel_loss(net(mel.to(device)), wav.to(device)).backward()
            optimizer.step()
        if dist.get_rank() == 0 and epoch % 50 == 0:
            torch.save(net.module.state_dict(), f"{args.run}/g_{epoch:05d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
