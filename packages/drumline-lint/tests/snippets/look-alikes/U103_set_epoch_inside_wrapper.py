import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from ocr.crnn import CRNN
from ocr.synth import MJSynth, ctc_collate


class ShardedLoader:
    def __init__(self, dataset, batch_size, workers=8, start_epoch=0):
        self._epoch = start_epoch
        self._sampler = DistributedSampler(dataset, drop_last=True)
        self._loader = DataLoader(dataset, batch_size=batch_size, sampler=self._sampler,
                                  num_workers=workers, collate_fn=ctc_collate,
                                  pin_memory=True, drop_last=True)

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        self._sampler.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self._loader)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    net = CRNN(n_classes=37).cuda()
    opt = torch.optim.Adadelta(net.parameters(), lr=1.0, rho=0.95)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=4, gamma=0.5)
    net = DDP(net, device_ids=[local_rank])
    loader = ShardedLoader(MJSynth("/data/mjsynth"), batch_size=256)

    for epoch in range(12):
        net.train()
        running = torch.zeros((), device="cuda")
        for images, targets, lengths in loader:
            logp = net(images.cuda(non_blocking=True)).log_softmax(2)
            in_len = torch.full((images.size(0),), logp.size(0), dtype=torch.long)
            loss = F.ctc_loss(logp, targets.cuda(), in_len, lengths, zero_infinity=True)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            running += loss.detach()
        sched.step()
        dist.all_reduce(running)
        if dist.get_rank() == 0:
            mean = running.item() / (len(loader) * dist.get_world_size())
            print(f"epoch {epoch}: {mean:.4f}")
            torch.save(net.module.state_dict(), "crnn.pth")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
