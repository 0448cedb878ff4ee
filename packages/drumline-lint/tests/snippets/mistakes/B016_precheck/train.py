import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomHorizontalFlip, Resize, ToTensor

import comm
from nets import ConvNet


def prepare_run(cfg):
    out = Path(cfg["out"])
    if comm.is_primary():
        if out.exists() and any(out.iterdir()) and not cfg.get("overwrite"):
            print(f"{out} is not empty, pass overwrite: true to use it anyway")
            sys.exit(1)
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.yaml").write_text(yaml.safe_dump(cfg))
    comm.synchronize()
    return out


def main(path):
    cfg = yaml.safe_load(Path(path).read_text())
    local_rank = comm.setup()
    torch.manual_seed(cfg["seed"] + comm.rank())
    out = prepare_run(cfg)
    data = ImageFolder(cfg["root"], Compose([Resize((64, 64)), RandomHorizontalFlip(), ToTensor()]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, cfg["batch"], sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(ConvNet(len(data.classes)).cuda(local_rank), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9)
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda(local_rank)), y.cuda(local_rank))
            opt.zero_grad()
            loss.backward()
            opt.step()
        stats = comm.reduce_dict({"loss": loss.item()}, torch.device("cuda", local_rank))
        if comm.is_primary():
            print(epoch, stats)
            torch.save(model.module.state_dict(), out / "model.pt")
    comm.teardown()


if __name__ == "__main__":
    main(sys.argv[1])
