import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from crowd.data import ShanghaiTech
from crowd.model import CSRNet


class Hook:
    def before_epoch(self, runner):
        pass

    def after_epoch(self, runner):
        pass


class SamplerHook(Hook):
    def before_epoch(self, runner):
        s = getattr(runner.loader, "sampler", None)
        if hasattr(s, "set_epoch"):
            s.set_epoch(runner.epoch)


class CheckpointHook(Hook):
    def after_epoch(self, runner):
        if dist.get_rank() == 0:
            torch.save(runner.model.module.state_dict(), f"csrnet_{runner.epoch}.pth")


class Runner:
    def __init__(self, model, loader, opt, hooks):
        self.model, self.loader, self.opt, self.hooks = model, loader, opt, hooks
        self.epoch = 0

    def call(self, name):
        for h in self.hooks:
            getattr(h, name)(self)

    def run(self, epochs):
        for self.epoch in range(epochs):
            self.call("before_epoch")
            self.model.train()
            for img, density in self.loader:
                loss = ((self.model(img.cuda()) - density.cuda()) ** 2).sum()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            self.call("after_epoch")


if __name__ == "__main__":
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    ds = ShanghaiTech("/data/shanghai")
    loader = DataLoader(ds, 4, sampler=DistributedSampler(ds), num_workers=4, drop_last=True)
    net = DDP(CSRNet().cuda(), device_ids=[gpu])
    opt = torch.optim.Adam(net.parameters(), lr=1e-5)
    Runner(net, loader, opt, [SamplerHook(), CheckpointHook()]).run(400)
    dist.destroy_process_group()
