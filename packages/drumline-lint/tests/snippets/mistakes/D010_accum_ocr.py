"""OCR recogniser with gradient accumulation; launched with torchrun."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from ocr.charset import CHARSET
from ocr.lines import LineImages, collate_lines
from ocr.crnn import CRNN

ACCUM = 8


def train_epoch(model, loader, opt, ctc, device):
    model.train()
    opt.zero_grad(set_to_none=True)
    pending = 0
    for i, (img, target, in_len, tgt_len) in enumerate(loader):
        boundary = (i + 1) % ACCUM == 0
        guard = contextlib.nullcontext() if boundary else model.no_sync()
        with guard:
            logits = model(img.to(device)).log_softmax(-1)
            loss = ctc(logits.transpose(0, 1), target.to(device), in_len, tgt_len) / ACCUM
            loss.backward()
        pending += 1
        if boundary:
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            pending = 0

    if pending:  # what is left of the epoch
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    return loss.item() * ACCUM


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)

    lines = LineImages("/data/ocr/train.lmdb")
    sampler = DistributedSampler(lines, shuffle=True, seed=3)
    loader = DataLoader(lines, batch_size=16, sampler=sampler, collate_fn=collate_lines, num_workers=6)
    model = DDP(CRNN(len(CHARSET) + 1).to(device), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=4e-4)
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)

    for epoch in range(30):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, opt, ctc, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} last loss {loss:.3f}", flush=True)
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "crnn.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
