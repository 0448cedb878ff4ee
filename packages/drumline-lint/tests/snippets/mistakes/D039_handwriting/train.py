"""Line transcription with a conv + transformer encoder and CTC."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter

from lines import IamLines, pad_lines
from net import LineEncoder


def get_args():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--data", required=True)
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--lr", type=float, default=5e-4)
    return ap.parse_args()


def main():
    args = get_args()
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    lines = IamLines(args.data, "train")
    sampler = DistributedSampler(lines, shuffle=True)
    loader = DataLoader(lines, args.batch, sampler=sampler, collate_fn=pad_lines, num_workers=4, drop_last=True)
    model = DDP(LineEncoder(n_out=80).cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    ctc = nn.CTCLoss(zero_infinity=True)
    board = SummaryWriter("runs/iam") if rank == 0 else None

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for img, text, img_len, text_len in loader:
            logp = model(img.cuda()).log_softmax(-1)
            loss = ctc(logp.transpose(0, 1), text.cuda(), img_len, text_len)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            step += 1
            if board is not None and step % 20 == 0:
                board.add_scalar("ctc", loss.item(), step)
        if rank == 0:
            torch.save(model.module.state_dict(), "iam.pt")
        dist.barrier()
    if board is not None:
        board.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
