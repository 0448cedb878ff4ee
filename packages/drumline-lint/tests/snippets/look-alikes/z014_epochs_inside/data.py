from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class ShardedLoader:
    """A loader over this rank's share of a data set; reshuffles with each pass."""

    def __init__(self, dataset, batch_size, first_epoch=0, **options):
        self.sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
        self.loader = DataLoader(dataset, batch_size=batch_size, sampler=self.sampler,
                                 drop_last=True, pin_memory=True, **options)
        self.epoch = first_epoch

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)
