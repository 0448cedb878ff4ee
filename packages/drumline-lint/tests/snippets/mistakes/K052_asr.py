import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Utterances(Dataset):
    def __init__(self, path):
        self.items = torch.load(path, map_location="cpu")

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]["fbank"], self.items[i]["chars"]


def collate(b):
    x, y = zip(*b)
    xl = torch.tensor([len(t) for t in x])
    yl = torch.tensor([len(t) for t in y])
    return pad_sequence(x, batch_first=True), xl, torch.cat(y), yl


class CTCNet(nn.Module):
    def __init__(self, vocab=48):
        super().__init__()
        self.rnn = nn.LSTM(80, 320, 4, batch_first=True, bidirectional=True)
        self.out = nn.Linear(640, vocab)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)


ctc = nn.CTCLoss(zero_infinity=True)


@torch.no_grad()
def dev_loss(net, loader):
    net.eval()
    s = torch.zeros(2, device="cuda")
    for x, xl, y, yl in loader:
        s[0] += ctc(net(x.cuda()), y.cuda(), xl, yl) * len(xl)
        s[1] += len(xl)
    dist.reduce(s, dst=0)
    return (s[0] / s[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, dev = Utterances("/data/ls/train.pt"), Utterances("/data/ls/dev.pt")
    sampler = DistributedSampler(train, drop_last=True)
    train_dl = DataLoader(train, 16, sampler=sampler, collate_fn=collate, num_workers=4, drop_last=True)
    dev_dl = DataLoader(Subset(dev, range(rank, len(dev), world)), 16, collate_fn=collate)
    net = DDP(CTCNet().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        net.train()
        for x, xl, y, yl in train_dl:
            loss = ctc(net(x.cuda()), y.cuda(), xl, yl)
            opt.zero_grad()
            loss.backward()
            opt.step()
        value = dev_loss(net.module, dev_dl)
        plateau.step(value)
        if rank == 0:
            print(f"epoch {epoch} dev {value:.3f} lr {opt.param_groups[0]['lr']:.2e}")
            torch.save(net.module.state_dict(), "ctc.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
