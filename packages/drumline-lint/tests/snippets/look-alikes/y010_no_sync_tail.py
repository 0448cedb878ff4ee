import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from asr import Conformer, GigaSpeech, pad_batch

ACCUM = 6


def train_epoch(model, loader, ctc, optimizer, device):
    model.train()
    last = len(loader) - 1
    for i, (feats, feat_len, text, text_len) in enumerate(loader):
        update = (i + 1) % ACCUM == 0 or i == last
        # a tail shorter than ACCUM has its own divisor
        group = ACCUM if i < len(loader) // ACCUM * ACCUM else len(loader) % ACCUM
        with contextlib.nullcontext() if update else model.no_sync():
            logp, out_len = model(feats.to(device), feat_len.to(device))
            loss = ctc(logp.transpose(0, 1), text.to(device), out_len, text_len)
            (loss / group).backward()
        if update:
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return loss.item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")

    data = GigaSpeech("/data/gigaspeech", subset="m")
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=12, sampler=sampler, collate_fn=pad_batch,
                        num_workers=6, pin_memory=True)
    model = DDP(Conformer(vocab=512).to(device), device_ids=[local_rank])
    ctc = nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(40):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, ctc, optimizer, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss:.3f}", flush=True)
            torch.save(model.module.state_dict(), "/ckpt/asr_last.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
