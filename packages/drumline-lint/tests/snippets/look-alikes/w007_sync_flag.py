import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from asr import Conformer, LogMels, pad

settings = {"accumulate": 4, "micro_batch": 8, "epochs": 50, "lr": 5e-4, "root": "/data/voxpopuli"}


def train_one_epoch(model, loader, opt, accumulate):
    usable = len(loader) - len(loader) % accumulate
    for i, (mels, text, mel_len, text_len) in enumerate(loader):
        if i >= usable:
            break
        last = i % accumulate == accumulate - 1
        model.require_backward_grad_sync = last
        logp = model(mels.cuda(non_blocking=True)).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(logp, text.cuda(), mel_len, text_len, zero_infinity=True)
        (loss / accumulate).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    return loss.item()


def main(s):
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    data = LogMels(s["root"], split="train")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, s["micro_batch"], sampler=sampler, collate_fn=pad, num_workers=4)
    model = DDP(Conformer(tokens=64).cuda(), device_ids=[gpu])
    opt = torch.optim.AdamW(model.parameters(), lr=s["lr"])
    for epoch in range(s["epochs"]):
        sampler.set_epoch(epoch)
        last_loss = train_one_epoch(model, loader, opt, s["accumulate"])
        if dist.get_rank() == 0:
            print(f"epoch {epoch} {last_loss:.4f}")
            torch.save(model.module.state_dict(), "conformer.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(settings)
