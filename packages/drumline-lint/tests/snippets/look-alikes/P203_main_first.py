import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification


@contextlib.contextmanager
def main_process_first():
    if dist.get_rank() != 0:
        dist.barrier()
    try:
        yield
    finally:
        if dist.get_rank() == 0:
            dist.barrier()


def align(tok):
    def fn(batch):
        enc = tok(batch["tokens"], is_split_into_words=True, truncation=True, max_length=192)
        labels = []
        for i, tags in enumerate(batch["ner_tags"]):
            prev, row = None, []
            for w in enc.word_ids(i):
                row.append(-100 if w is None or w == prev else tags[w])
                prev = w
            labels.append(row)
        enc["labels"] = labels
        return enc
    return fn


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="xlm-roberta-base")
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--bs", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-5)
    ap.add_argument("--out", default="ner")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    tok = AutoTokenizer.from_pretrained(args.model)
    with main_process_first():
        raw = load_dataset("conll2003", split="train")
        ds = raw.map(align(tok), batched=True, remove_columns=raw.column_names)

    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, args.bs, sampler=sampler, collate_fn=DataCollatorForTokenClassification(tok))
    net = AutoModelForTokenClassification.from_pretrained(args.model, num_labels=9).cuda()
    model = DistributedDataParallel(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for step, batch in enumerate(loader):
            loss = model(**{k: v.cuda() for k, v in batch.items()}).loss
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if rank == 0 and step % 50 == 0:
                print(f"{epoch}/{step} {loss.item():.4f}")
    if rank == 0:
        net.save_pretrained(args.out)
        tok.save_pretrained(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
