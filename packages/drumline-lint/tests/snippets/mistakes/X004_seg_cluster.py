# srun torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29500 seg_cluster.py
import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.models.segmentation import fcn_resnet50

CFG = dict(
    data="/lustre/project/seg/tiles.pt",
    ckpt="/lustre/project/seg/checkpoints/last.pt",
    classes=12,
    epochs=40,
    batch=8,
    lr=0.01,
)


def main(cfg):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)

    blob = torch.load(cfg["data"], map_location="cpu")
    data = TensorDataset(blob["image"], blob["mask"])
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, cfg["batch"], sampler=sampler, num_workers=4)

    net = fcn_resnet50(weights=None, weights_backbone=None, num_classes=cfg["classes"]).to(device)
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net = DDP(net, device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), lr=cfg["lr"], momentum=0.9)

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for image, mask in loader:
            loss = cross_entropy(net(image.to(device))["out"], mask.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if local_rank == 0:
            state = {"net": net.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}
            torch.save(state, cfg["ckpt"])
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(CFG)
