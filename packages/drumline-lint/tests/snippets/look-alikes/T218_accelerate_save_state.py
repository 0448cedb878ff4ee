import shutil
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.data import create_transform
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

OUT = Path("runs/beit")
KEEP = 3


def prune(acc):
    if not acc.is_main_process:
        return
    folders = sorted(OUT.glob("step_*"), key=lambda p: int(p.name.split("_")[1]))
    for old in folders[:-KEEP]:
        shutil.rmtree(old)


def main():
    acc = Accelerator(mixed_precision="fp16", project_dir=str(OUT))
    ds = ImageFolder("/data/in100/train", create_transform(224, is_training=True, auto_augment="rand-m9-mstd0.5"))
    loader = DataLoader(ds, 64, shuffle=True, num_workers=8, drop_last=True)
    model = timm.create_model("beit_base_patch16_224", num_classes=100)
    opt = torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100 * len(loader))
    model, opt, loader, sched = acc.prepare(model, opt, loader, sched)

    step = 0
    for epoch in range(100):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            acc.backward(loss)
            acc.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
            step += 1
            if step % 2000 == 0:
                acc.save_state(str(OUT / f"step_{step}"))
                acc.wait_for_everyone()
                prune(acc)
        mean = acc.gather(loss.detach()).mean()
        acc.print(f"epoch {epoch}: {mean.item():.4f}")
    acc.save_state(str(OUT / "final"))
    acc.end_training()


if __name__ == "__main__":
    main()
