import os

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, BartForConditionalGeneration, DataCollatorForSeq2Seq


@torch.no_grad()
def exact_match(model, loader, tok):
    model.eval()
    stats = torch.zeros(2, device="cuda")
    for batch in loader:
        out = model.module.generate(input_ids=batch["input_ids"].cuda(),
                                    attention_mask=batch["attention_mask"].cuda(), max_new_tokens=32)
        labels = batch["labels"].masked_fill(batch["labels"] == -100, tok.pad_token_id)
        pred = tok.batch_decode(out, skip_special_tokens=True)
        gold = tok.batch_decode(labels, skip_special_tokens=True)
        stats[0] += sum(p.strip() == g.strip() for p, g in zip(pred, gold))
        stats[1] += len(gold)
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    tok = AutoTokenizer.from_pretrained("facebook/bart-base")
    net = BartForConditionalGeneration.from_pretrained("facebook/bart-base").cuda()
    model = DDP(net, device_ids=[local_rank])
    data = load_from_disk("data/nq_open_tok")
    collate = DataCollatorForSeq2Seq(tok, model=net)
    sampler = DistributedSampler(data["train"])
    train = DataLoader(data["train"], 32, sampler=sampler, collate_fn=collate)
    dev = DataLoader(data["dev"], 32, sampler=DistributedSampler(data["dev"], shuffle=False), collate_fn=collate)
    opt = torch.optim.AdamW(model.parameters(), 3e-5)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        model.train()
        for batch in train:
            loss = model(**{k: v.cuda() for k, v in batch.items()}).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
        em = exact_match(model, dev, tok)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} EM {em:.4f}")
            model.module.save_pretrained(f"out/bart-{epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
