import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from inpainting import HoleyPhotos, PartialConvUNet


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    os.makedirs(args.out, exist_ok=True)

    net = PartialConvUNet().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-4)
    first = 0
    if args.resume is not None:
        state = torch.load(args.resume, device)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    model = DDP(net, device_ids=[local_rank])

    photos = HoleyPhotos(args.photos, size=512)
    sampler = DistributedSampler(photos)
    loader = DataLoader(photos, batch_size=8, sampler=sampler, num_workers=8, pin_memory=True,
                        drop_last=True)

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for image, mask in loader:
            image = image.to(device, non_blocking=True)
            mask = mask.to(device, non_blocking=True)
            filled = model(image * mask, mask)
            hole = F.l1_loss(filled * (1 - mask), image * (1 - mask))
            valid = F.l1_loss(filled * mask, image * mask)
            loss = 6.0 * hole + valid
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(),
                        "epoch": epoch}, f"{args.out}/inpaint_{epoch:03d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("photos")
    parser.add_argument("--resume")
    parser.add_argument("--out", default="/ckpt/inpaint")
    parser.add_argument("--epochs", type=int, default=80)
    main(parser.parse_args())
