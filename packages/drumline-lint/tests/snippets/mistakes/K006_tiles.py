"""Land-cover segmentation of satellite tiles, one process per GPU through mp.spawn."""
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler


class Tiles(Dataset):
    def __init__(self, index):
        with open(index) as fh:
            self.items = [line.strip() for line in fh]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        d = torch.load(self.items[i], map_location="cpu")
        return d["bands"].float() / 10000, d["cover"].long()


def small_unet(bands, classes):
    return nn.Sequential(
        nn.Conv2d(bands, 32, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(64, classes, 1))


def worker(rank, world_size, epochs):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29511",
                            rank=rank, world_size=world_size)
    ds = Tiles("/data/s2/train.txt")
    batches = BatchSampler(RandomSampler(ds), batch_size=16, drop_last=True)
    loader = DataLoader(ds, batch_sampler=batches, num_workers=6, pin_memory=True)
    model = DDP(small_unet(12, 9).cuda(rank), device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ce = nn.CrossEntropyLoss(ignore_index=255)
    for epoch in range(epochs):
        for bands, cover in loader:
            loss = ce(model(bands.cuda(rank)), cover.cuda(rank))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(model.module.state_dict(), f"cover_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    mp.spawn(worker, args=(n, 25), nprocs=n, join=True)
