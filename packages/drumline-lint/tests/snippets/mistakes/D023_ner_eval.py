"""Token classification; predictions of all ranks are collected for seqeval on rank 0."""
import os

import torch
import torch.distributed as dist
from seqeval.metrics import f1_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import AutoModelForTokenClassification, AutoTokenizer

from ner.data import ConllDataset, LABELS, make_collate

MODEL = "/models/xlmr-base"


def collect(t, world):
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


@torch.no_grad()
def evaluate(net, loader, device, world):
    net.eval()
    preds, golds = [], []
    for batch in loader:
        enc = {k: v.to(device) for k, v in batch.items() if k != "labels"}
        labels = batch["labels"].to(device)
        keep = labels != -100
        preds.append(net(**enc).logits.argmax(-1)[keep])
        golds.append(labels[keep])
    pred = collect(torch.cat(preds), world).tolist()
    gold = collect(torch.cat(golds), world).tolist()
    return f1_score([[LABELS[i] for i in gold]], [[LABELS[i] for i in pred]])


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)

    tok = AutoTokenizer.from_pretrained(MODEL)
    train, dev = ConllDataset("data/train.conll"), ConllDataset("data/dev.conll")
    sampler = DistributedSampler(train, shuffle=True)
    train_dl = DataLoader(train, 32, sampler=sampler, collate_fn=make_collate(tok), drop_last=True)
    dev_dl = DataLoader(Subset(dev, range(rank, len(dev), world)), 64, collate_fn=make_collate(tok))

    net = AutoModelForTokenClassification.from_pretrained(MODEL, num_labels=len(LABELS)).to(device)
    model = DDP(net, device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    best = 0.0
    for epoch in range(8):
        sampler.set_epoch(epoch)
        model.train()
        for batch in train_dl:
            loss = model(**{k: v.to(device) for k, v in batch.items()}).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
        f1 = evaluate(model.module, dev_dl, device, world)
        if rank == 0:
            print(f"epoch {epoch} dev F1 {f1:.4f}", flush=True)
            if f1 > best:
                best = f1
                model.module.save_pretrained("ner-best")
                tok.save_pretrained("ner-best")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
