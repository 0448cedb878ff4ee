import argparse

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from data import build_loader
from utils.dist import all_reduce_sum, cleanup, get_world_size, init_distributed, is_main_process, seed_everything


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", default="data/train.jsonl")
    ap.add_argument("--model", default="distilbert-base-uncased")
    ap.add_argument("--out", default="intent")
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--intents", type=int, default=77)
    args = ap.parse_args()

    device = init_distributed()
    seed_everything(0)
    tok = AutoTokenizer.from_pretrained(args.model)
    net = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=args.intents).to(device)
    net = DDP(net, device_ids=[device.index])
    loader = build_loader(args.train, tok, 32)
    opt = torch.optim.AdamW(net.parameters(), lr=5e-5)

    for epoch in range(args.epochs):
        net.train()
        total = 0.0
        for ids, mask, y in loader:
            out = net(input_ids=ids.to(device), attention_mask=mask.to(device), labels=y.to(device))
            opt.zero_grad(set_to_none=True)
            out.loss.backward()
            opt.step()
            total += out.loss.item()
        (total,) = all_reduce_sum([total], device)
        if is_main_process():
            print(f"epoch {epoch} loss {total / len(loader) / get_world_size():.4f}")
    if is_main_process():
        net.module.save_pretrained(args.out)
        tok.save_pretrained(args.out)
    cleanup()


if __name__ == "__main__":
    main()
