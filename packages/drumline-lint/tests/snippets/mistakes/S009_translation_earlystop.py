# torchrun --nproc_per_node=4 translation_earlystop.py
import math
import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

MODEL = "Helsinki-NLP/opus-mt-en-de"
PATIENCE = 3
MAX_EPOCHS = 40


def setup():
    dist.init_process_group("nccl")
    idx = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(idx)
    return dist.get_rank(), torch.device("cuda", idx)


def make_loader(ds, collator, shuffle, bs):
    sampler = DistributedSampler(ds, shuffle=shuffle)
    return DataLoader(ds, batch_size=bs, sampler=sampler, collate_fn=collator, num_workers=4), sampler


@torch.no_grad()
def dev_loss(model, loader, device):
    model.eval()
    total = tokens = 0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        n = (batch["labels"] != -100).sum().item()
        total += model(**batch).loss.item() * n
        tokens += n
    return total / tokens


def main():
    rank, device = setup()
    tok = AutoTokenizer.from_pretrained(MODEL)
    net = AutoModelForSeq2SeqLM.from_pretrained(MODEL).to(device)
    net = DDP(net, device_ids=[device.index])
    collate = DataCollatorForSeq2Seq(tok, model=net.module)

    data = load_from_disk("data/ende_tokenized")
    train_loader, sampler = make_loader(data["train"], collate, True, 32)
    dev_loader, _ = make_loader(data["dev"], collate, False, 64)

    opt = torch.optim.AdamW(net.parameters(), lr=5e-5)
    best, bad = math.inf, 0
    for epoch in range(MAX_EPOCHS):
        sampler.set_epoch(epoch)
        net.train()
        for batch in train_loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            loss = net(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()

        score = dev_loss(net, dev_loader, device)
        if score < best - 1e-4:
            best, bad = score, 0
            if rank == 0:
                net.module.save_pretrained("ckpt/best")
        else:
            bad += 1
        if bad >= PATIENCE:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
