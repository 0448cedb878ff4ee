import torch
import torch.distributed as dist


class Callback:
    def epoch_start(self, loop, epoch):
        pass

    def epoch_end(self, loop, epoch):
        pass


class Reshuffle(Callback):
    def __init__(self, loader):
        self.sampler = loader.sampler

    def epoch_start(self, loop, epoch):
        self.sampler.set_epoch(epoch)


class SaveWeights(Callback):
    def __init__(self, path):
        self.path = path

    def epoch_end(self, loop, epoch):
        if dist.get_rank() == 0:
            torch.save(loop.net.module.state_dict(), self.path)
