# torchrun --nproc_per_node=4 ner_gather.py
import os

import torch
import torch.distributed as dist
from seqeval.metrics import f1_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForTokenClassification, AutoTokenizer

from conll import CoNLL, LABELS

BASE = "xlm-roberta-base"


def collate(items):
    ids = pad_sequence([i["ids"] for i in items], batch_first=True, padding_value=1)
    lab = pad_sequence([i["labels"] for i in items], batch_first=True, padding_value=-100)
    return ids, (ids != 1).long(), lab


def gather_flat(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t)
    return torch.cat(parts)


@torch.no_grad()
def evaluate(model, loader, dev):
    model.eval()
    preds, golds = [], []
    for ids, mask, lab in loader:
        out = model(input_ids=ids.to(dev), attention_mask=mask.to(dev)).logits.argmax(-1)
        lab = lab.to(dev)
        keep = lab != -100
        preds.append(out[keep])
        golds.append(lab[keep])
    p = gather_flat(torch.cat(preds))
    g = gather_flat(torch.cat(golds))
    hits = (p == g).float().mean().item()
    f1 = f1_score([[LABELS[i] for i in g.tolist()]], [[LABELS[i] for i in p.tolist()]])
    return hits, f1


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dev = torch.device("cuda", local)

    tok = AutoTokenizer.from_pretrained(BASE)
    train, test = CoNLL("train", tok), CoNLL("test", tok)
    sampler = DistributedSampler(train)
    train_dl = DataLoader(train, 16, sampler=sampler, collate_fn=collate, num_workers=2)
    test_dl = DataLoader(test, 32, sampler=DistributedSampler(test, shuffle=False), collate_fn=collate)

    model = AutoModelForTokenClassification.from_pretrained(BASE, num_labels=len(LABELS)).to(dev)
    model = DDP(model, device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-5)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        model.train()
        for ids, mask, lab in train_dl:
            loss = model(input_ids=ids.to(dev), attention_mask=mask.to(dev), labels=lab.to(dev)).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc, f1 = evaluate(model, test_dl, dev)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} acc {acc:.4f} f1 {f1:.4f}")
    if dist.get_rank() == 0:
        model.module.save_pretrained("ner-xlmr")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
