import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.io import read_image


class ADE(Dataset):
    def __init__(self, root, size=512):
        self.img = sorted(os.path.join(root, "images/training", f) for f in os.listdir(root + "/images/training"))
        self.size = size

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        x = read_image(self.img[i], torchvision.io.ImageReadMode.RGB).float() / 255
        y = read_image(self.img[i].replace("images", "annotations").replace(".jpg", ".png")).float()
        x = F.interpolate(x[None], (self.size, self.size), mode="bilinear")[0]
        y = F.interpolate(y[None], (self.size, self.size), mode="nearest")[0, 0].long() - 1
        return x, y


def setup():
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    return rank, world_size, local_rank


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--epochs", type=int, default=160)
    ap.add_argument("--batch-size", type=int, default=4)
    ap.add_argument("--lr", type=float, default=6e-5)
    ap.add_argument("--out", required=True)
    args = ap.parse_args()

    rank, world_size, local_rank = setup()
    ds = ADE(args.root)
    sampler = DistributedSampler(ds, world_size, rank)
    dl = DataLoader(ds, args.batch_size, sampler=sampler, num_workers=6, drop_last=True)
    net = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, num_classes=150)
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in dl:
            loss = F.cross_entropy(model(x.cuda())["out"], y.cuda(), ignore_index=-1)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save(net.state_dict(), os.path.join(args.out, "last.pt"))
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
