from torch.utils.data import DataLoader, DistributedSampler


class EpochLoader:
    """DataLoader over this rank's part that reshuffles at each pass."""

    def __init__(self, dataset, batch_size, start_epoch=0, **kw):
        self.sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
        self.loader = DataLoader(dataset, batch_size, sampler=self.sampler,
                                 pin_memory=True, drop_last=True, **kw)
        self.epoch = start_epoch

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        yield from self.loader
