from torch.utils.data.distributed import DistributedSampler


def epochs(loader, n, start=0):
    for epoch in range(start, n):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield epoch
