import argparse
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import mobilenet_v3_large


def ensure_extracted(archive, target):
    """Unpack to node-local scratch once per node; safe to call from every process."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(target) + ".lock"):
        if not target.exists():
            tmp = tempfile.mkdtemp(dir=target.parent)
            try:
                with zipfile.ZipFile(archive) as z:
                    z.extractall(tmp)
                os.rename(tmp, target)
            except BaseException:
                shutil.rmtree(tmp, ignore_errors=True)
                raise
    return target


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--archive", required=True)
    p.add_argument("--scratch", default=os.environ.get("TMPDIR", "/tmp"))
    p.add_argument("--classes", type=int, default=365)
    p.add_argument("--epochs", type=int, default=30)
    p.add_argument("--batch", type=int, default=96)
    p.add_argument("--out", default="mobilenet.pt")
    args = p.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    root = ensure_extracted(args.archive, Path(args.scratch) / "places365")

    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor()])
    ds = ImageFolder(root / "train", tf)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, args.batch, sampler=sampler, num_workers=10, pin_memory=True, drop_last=True)
    model = DDP(mobilenet_v3_large(num_classes=args.classes).cuda(), device_ids=[local_rank])
    opt = torch.optim.RMSprop(model.parameters(), lr=0.016, momentum=0.9, weight_decay=1e-5)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.97)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
