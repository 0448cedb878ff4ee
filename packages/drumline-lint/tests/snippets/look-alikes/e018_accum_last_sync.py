import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification
from datasets import load_from_disk

ACCUM = 8
MODEL = "xlm-roberta-large"


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    tok = AutoTokenizer.from_pretrained(MODEL)
    ds = load_from_disk("/data/wikiann_tok/train")
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, 4, sampler=sampler, num_workers=2, drop_last=True,
                        collate_fn=DataCollatorForTokenClassification(tok))

    model = AutoModelForTokenClassification.from_pretrained(MODEL, num_labels=7).cuda()
    model = DDP(model, device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    steps_per_epoch = len(loader) // ACCUM

    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        opt.zero_grad(set_to_none=True)
        for i, batch in enumerate(loader):
            if i == steps_per_epoch * ACCUM:
                break
            last = (i + 1) % ACCUM == 0
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            ctx = nullcontext() if last else model.no_sync()
            with ctx:
                loss = model(**batch).loss / ACCUM
                loss.backward()
            if not last:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            if rank == 0 and (i + 1) % (ACCUM * 50) == 0:
                print(f"ep {epoch} step {(i + 1) // ACCUM}/{steps_per_epoch} loss {loss.item() * ACCUM:.3f}")

    if rank == 0:
        model.module.save_pretrained("wikiann-xlmr")
        tok.save_pretrained("wikiann-xlmr")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
