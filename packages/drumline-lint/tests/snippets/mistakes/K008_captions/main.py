import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from datamodule import CaptionData
from engine import fit
from net import Captioner


def main():
    lr = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(lr)
    dist.init_process_group("nccl")
    data = CaptionData("/data/coco_feats", batch_size=96)
    model = DDP(Captioner().cuda(), device_ids=[lr])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    fit(model, optimizer, data.train_loader(), epochs=15)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
