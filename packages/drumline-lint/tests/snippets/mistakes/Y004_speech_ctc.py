# torchrun --nproc_per_node=8 --standalone speech_ctc.py
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from speechlib.data import LibriFeatures, collate_ctc
from speechlib.models import Conformer


def log_step(step, loss, started):
    if dist.get_rank() != 0:
        return
    mean_loss = loss.detach().clone()
    dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)
    rate = step / (time.time() - started)
    print(f"step {step} loss {mean_loss.item():.4f} {rate:.2f} it/s", flush=True)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")

    dataset = LibriFeatures("/data/librispeech/fbank80", split="train-960")
    sampler = DistributedSampler(dataset, shuffle=True, seed=17, drop_last=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, collate_fn=collate_ctc,
                        num_workers=6, pin_memory=True, drop_last=True)

    model = DDP(Conformer(vocab=1024).cuda(), device_ids=[local_rank])
    ctc = nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98))

    step, started = 0, time.time()
    for epoch in range(60):
        sampler.set_epoch(epoch)
        for feats, feat_len, tokens, token_len in loader:
            log_probs, out_len = model(feats.cuda(non_blocking=True),
                                       feat_len.cuda(non_blocking=True))
            loss = ctc(log_probs.transpose(0, 1), tokens.cuda(non_blocking=True),
                       out_len, token_len)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            step += 1
            if step % 100 == 0:
                log_step(step, loss, started)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"ctc_{epoch:03d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
