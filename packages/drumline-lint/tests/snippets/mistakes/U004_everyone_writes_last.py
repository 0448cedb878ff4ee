import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from speech.data import LibriFbank, pad_collate
from speech.model import ConformerCTC

log = logging.getLogger("asr")


@dataclass
class Config:
    out: Path = Path("/shared/runs/conformer_s")
    epochs: int = 60
    batch: int = 24
    lr: float = 5e-4


def save_state(cfg, epoch, model, optimizer, scheduler):
    cfg.out.mkdir(parents=True, exist_ok=True)
    state = {
        "epoch": epoch,
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(state, cfg.out / "last.pt")
    log.info("saved epoch %d", epoch)


def main():
    cfg = Config()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group(backend="nccl", init_method="env://")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)

    ds = LibriFbank("train-960")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=cfg.batch, sampler=sampler, collate_fn=pad_collate, num_workers=6)

    model = DistributedDataParallel(ConformerCTC().cuda(gpu), device_ids=[gpu])
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=cfg.lr, total_steps=cfg.epochs * len(loader))

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for feats, feat_lens, toks, tok_lens in loader:
            loss = model(feats.cuda(gpu), feat_lens.cuda(gpu), toks.cuda(gpu), tok_lens.cuda(gpu))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
        save_state(cfg, epoch, model, optimizer, scheduler)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
