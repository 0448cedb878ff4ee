import argparse
import json

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForSeq2SeqLM


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1)
    ap.add_argument("--model", default="facebook/nllb-200-1.3B")
    ap.add_argument("--pairs", default="/data/nllb_pairs.pt")
    ap.add_argument("--ds", default="ds_zero2.json")
    ap.add_argument("--out", default="ckpt_nllb")
    args = ap.parse_args()
    deepspeed.init_distributed()
    with open(args.ds) as fh:
        cfg = json.load(fh)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=cfg)
    d = torch.load(args.pairs, map_location="cpu")
    ds = TensorDataset(d["src"], d["mask"], d["tgt"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, engine.train_micro_batch_size_per_gpu(), sampler=sampler, drop_last=True)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        engine.train()
        for src, mask, tgt in loader:
            src, mask, tgt = (t.to(engine.device) for t in (src, mask, tgt))
            loss = engine(input_ids=src, attention_mask=mask, labels=tgt).loss
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}", client_state={"epoch": epoch})
        if dist.get_rank() == 0:
            print("epoch", epoch, "saved")


if __name__ == "__main__":
    main()
