import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tabular.data import Higgs
from tabular.model import FTTransformer


def init_distributed():
    if "RANK" not in os.environ:
        return False, 0
    dist.init_process_group("nccl")
    return True, int(os.environ["LOCAL_RANK"])


def main():
    distributed, local_rank = init_distributed()
    torch.cuda.set_device(local_rank)
    is_master = not distributed or dist.get_rank() == 0

    ds = Higgs("/data/higgs.parquet")
    sampler = DistributedSampler(ds) if distributed else None
    loader = DataLoader(ds, batch_size=1024, shuffle=(sampler is None), sampler=sampler,
                        num_workers=4, drop_last=True)

    model = FTTransformer(28).cuda()
    raw = model
    if distributed:
        model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    bce = torch.nn.BCEWithLogitsLoss()

    for epoch in range(50):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            loss = bce(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if is_master:
            print(epoch, loss.item())
            torch.save(raw.state_dict(), "ft.pt")

    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
