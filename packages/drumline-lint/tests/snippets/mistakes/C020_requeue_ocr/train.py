import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from ocr import LineDataset, Recognizer, ctc_loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ckpt-dir", type=Path, required=True)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    model = DDP(Recognizer().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    start = 0
    last = args.ckpt_dir / "last.pt"
    if last.exists():
        state = torch.load(last, map_location=f"cuda:{local_rank}", weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1

    dataset = LineDataset("/data/lines")
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=6)
    for epoch in range(start, 60):
        sampler.set_epoch(epoch)
        for image, text in loader:
            optimizer.zero_grad()
            ctc_loss(model(image.cuda()), text).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            tmp = last.with_suffix(".tmp")
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, tmp
            )
            os.replace(tmp, last)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
