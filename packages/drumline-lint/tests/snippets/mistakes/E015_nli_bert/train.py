import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import (AutoModelForSequenceClassification, AutoTokenizer,
                          get_linear_schedule_with_warmup)

from dataset import get_loader

MODEL = "bert-base-uncased"
TRAIN = "/data/snli/snli_1.0_train.jsonl"
EPOCHS, BATCH = 3, 32


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    tok = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=3).cuda()
    model = DDP(model, device_ids=[local_rank])

    loader = get_loader(TRAIN, tok, BATCH)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
    total = EPOCHS * len(loader)
    sched = get_linear_schedule_with_warmup(opt, int(0.06 * total), total)

    for epoch in range(EPOCHS):
        model.train()
        for step, (enc, y) in enumerate(loader):
            enc = {k: v.cuda(non_blocking=True) for k, v in enc.items()}
            out = model(**enc, labels=torch.tensor(y, device="cuda"))
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
            if rank == 0 and step % 200 == 0:
                print(f"ep {epoch} step {step}/{len(loader)} loss {out.loss.item():.3f} (rank 0)")
    dist.barrier()
    if rank == 0:
        model.module.save_pretrained("snli-bert")
        tok.save_pretrained("snli-bert")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
