import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from datasets import load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "EleutherAI/pythia-410m"


def collate_with(pad):
    def collate(rows):
        ids = nn.utils.rnn.pad_sequence([r["input_ids"] for r in rows], True, pad)
        mask = nn.utils.rnn.pad_sequence([r["attention_mask"] for r in rows], True, 0)
        return ids, mask
    return collate


@torch.no_grad()
def perplexity(net, loader):
    net.eval()
    totals = torch.zeros(2, dtype=torch.double, device="cuda")
    for ids, mask in loader:
        ids, mask = ids.cuda(), mask.cuda()
        logits = net(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        totals[0] += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        totals[1] += (labels != -100).sum()
    dist.all_reduce(totals, op=dist.ReduceOp.SUM)
    return math.exp((totals[0] / totals[1]).item())


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    tokenizer = AutoTokenizer.from_pretrained(NAME)
    data = load_from_disk("data/pubmed_tokenized").with_format("torch")
    collate = collate_with(tokenizer.eos_token_id)
    sampler = DistributedSampler(data["train"], shuffle=True, drop_last=True)
    train_loader = DataLoader(data["train"], 8, sampler=sampler, collate_fn=collate, num_workers=2, drop_last=True)
    # no padding to equal length here: every validation document is counted once
    mine = Subset(data["validation"], range(rank, len(data["validation"]), world))
    val_loader = DataLoader(mine, 8, collate_fn=collate)

    model = DDP(AutoModelForCausalLM.from_pretrained(NAME).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for ids, mask in train_loader:
            ids, mask = ids.cuda(), mask.cuda()
            labels = ids.masked_fill(mask == 0, -100)
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        ppl = perplexity(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch} ppl {ppl:.3f}", flush=True)
            model.module.save_pretrained(f"pythia_pubmed_{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
