"""torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29400 train.py --config base.yaml"""
import argparse

import torch
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling
from datasets import load_from_disk

from engine import train_epoch
from utils.dist import cleanup, is_main, setup


def main(cfg):
    device = setup()
    tok = AutoTokenizer.from_pretrained(cfg["tokenizer"])
    ds = load_from_disk(cfg["data"]).with_format("torch", columns=["input_ids", "attention_mask"])
    sampler = DistributedSampler(ds, shuffle=True, seed=cfg["seed"])
    loader = DataLoader(
        ds,
        batch_size=cfg["micro_batch"],
        sampler=sampler,
        collate_fn=DataCollatorForLanguageModeling(tok, mlm_probability=0.15),
        num_workers=4,
        drop_last=True,
    )
    model = BertForMaskedLM(BertConfig(vocab_size=len(tok))).to(device)
    model = DDP(model, device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, cfg["lr"], epochs=cfg["epochs"], steps_per_epoch=len(loader))

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, opt, sched, device, epoch, cfg["log_every"])
        if is_main():
            model.module.save_pretrained(f"{cfg['out']}/epoch{epoch}")
    cleanup()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--config", required=True)
    main(yaml.safe_load(open(ap.parse_args().config)))
