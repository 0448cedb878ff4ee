import argparse

import torch
import torch.nn.functional as F
from monai.networks.nets import UNet
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckpt import load_checkpoint, save_checkpoint
from utils.dist import barrier, cleanup, init_distributed, is_main_process, seed_everything


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--volumes", default="data/spleen.pt")
    ap.add_argument("--ckpt", default="spleen_last.pt")
    ap.add_argument("--epochs", type=int, default=500)
    args = ap.parse_args()

    device = init_distributed()
    seed_everything(0)
    blob = torch.load(args.volumes, map_location="cpu", weights_only=True)
    data = TensorDataset(blob["image"], blob["label"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=4, drop_last=True)
    net = UNet(3, 1, 2, (16, 32, 64, 128), (2, 2, 2), norm="INSTANCE").to(device)
    net = DDP(net, device_ids=[device.index])
    opt = torch.optim.AdamW(net.parameters(), lr=2e-4)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, args.epochs, power=0.9)
    scaler = torch.amp.GradScaler("cuda")
    start = load_checkpoint(args.ckpt, net, opt, sched)
    barrier()

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        for image, label in loader:
            image, label = image.to(device, non_blocking=True), label.to(device, non_blocking=True)
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(net(image), label)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        sched.step()
        if is_main_process():
            print(f"epoch {epoch} loss {loss.item():.4f}")
        save_checkpoint(args.ckpt, net, opt, sched, epoch)
    cleanup()


if __name__ == "__main__":
    main()
