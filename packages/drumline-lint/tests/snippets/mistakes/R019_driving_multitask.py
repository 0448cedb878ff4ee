import os
import random
from itertools import cycle

import hydra
import torch
import torch.distributed as dist
import torch.nn as nn
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from driving.backbones import build_regnet
from driving.tasks import TASKS, build_task_dataset


class MultiTaskNet(nn.Module):
    def __init__(self, backbone, heads):
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleDict(heads)

    def forward(self, images, task):
        return self.heads[task](self.backbone(images))


class TaskIterator:
    def __init__(self, task, cfg):
        ds = build_task_dataset(task, cfg.data_root)
        self.sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
        self.loader = DataLoader(ds, batch_size=cfg.batch_size[task], sampler=self.sampler,
                                 num_workers=cfg.workers, pin_memory=True, drop_last=True)
        self.epoch = 0
        self.it = iter(self.loader)

    def next(self):
        try:
            return next(self.it)
        except StopIteration:
            self.epoch += 1
            self.sampler.set_epoch(self.epoch)
            self.it = iter(self.loader)
            return next(self.it)


@hydra.main(config_path="conf", config_name="multitask", version_base=None)
def main(cfg: DictConfig):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    names = list(cfg.tasks)
    net = MultiTaskNet(build_regnet(cfg.backbone), {n: TASKS[n].head(cfg) for n in names}).to(device)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.wd)
    criteria = {n: TASKS[n].loss(cfg).to(device) for n in names}
    streams = {n: TaskIterator(n, cfg) for n in names}

    task_rng = random.Random(cfg.seed)  # identical on all ranks, so that ranks agree on the task
    weights = [cfg.task_weight[n] for n in names]
    model.train()
    for step in range(cfg.max_steps):
        task = task_rng.choices(names, weights)[0]
        images, target = streams[task].next()
        images = images.to(device, non_blocking=True)
        target = {k: v.to(device, non_blocking=True) for k, v in target.items()}
        loss = criteria[task](model(images, task), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            if step % cfg.log_every == 0:
                print(f"{step} {task} {loss.item():.4f}", flush=True)
            if step % cfg.save_every == 0:
                torch.save(model.module.state_dict(), os.path.join(cfg.out, "last.pt"))

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
