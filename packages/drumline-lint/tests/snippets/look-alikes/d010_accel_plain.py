"""Audio tagging with Accelerate. accelerate launch --num_processes 8 d010_accel_plain.py"""
import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

from tags.data import Clips
from tags.model import TagNet


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/audioset")
    ap.add_argument("--project", default="runs/tags")
    ap.add_argument("--epochs", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()

    acc = Accelerator(
        mixed_precision="fp16",
        project_config=ProjectConfiguration(args.project, automatic_checkpoint_naming=True, total_limit=3),
        log_with="tensorboard",
    )
    acc.init_trackers("tags", config=vars(args))
    set_seed(51)

    train_dl = DataLoader(Clips(args.root, "train"), args.batch, shuffle=True, num_workers=8, drop_last=True)
    val_dl = DataLoader(Clips(args.root, "val"), 2 * args.batch, num_workers=4)
    model = TagNet(classes=527)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.95)
    model, opt, train_dl, val_dl = acc.prepare(model, opt, train_dl, val_dl)
    acc.register_for_checkpointing(sched)

    start = 0
    ckpts = os.path.join(args.project, "checkpoints")
    if args.resume and os.path.isdir(ckpts):
        acc.load_state()
        start = sched.last_epoch
        acc.project_configuration.iteration = start

    step = start * len(train_dl)
    for epoch in range(start, args.epochs):
        model.train()
        for wav, tags in train_dl:
            loss = F.binary_cross_entropy_with_logits(model(wav), tags)
            acc.backward(loss)
            opt.step()
            opt.zero_grad()
            step += 1
            if step % 50 == 0:
                acc.log({"loss": loss.item()}, step=step)
        sched.step()

        model.eval()
        losses = []
        with torch.no_grad():
            for wav, tags in val_dl:
                each = F.binary_cross_entropy_with_logits(model(wav), tags, reduction="none").mean(-1)
                losses.append(acc.gather_for_metrics(each))
        acc.log({"val_loss": torch.cat(losses).mean().item()}, step=step)
        acc.save_state()
    acc.end_training()


if __name__ == "__main__":
    main()
