import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Utterances(Dataset):
    def __init__(self, path):
        blob = torch.load(path, map_location="cpu", weights_only=True)
        self.feats, self.texts = blob["feats"], blob["texts"]

    def __len__(self):
        return len(self.feats)

    def __getitem__(self, i):
        return self.feats[i], self.texts[i]


def collate(batch):
    feats, texts = zip(*batch)
    frames = torch.tensor([len(f) for f in feats])
    lens = torch.tensor([len(t) for t in texts])
    return pad_sequence(feats, True), torch.cat(texts), frames, lens


class Recognizer(nn.Module):
    def __init__(self, tokens=500):
        super().__init__()
        self.rnn = nn.LSTM(80, 640, 4, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(1280, tokens)

    def forward(self, x):
        return self.fc(self.rnn(x)[0]).log_softmax(-1)


def any_rank(flag, device):
    t = torch.tensor(float(flag), device=device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.item() > 0


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="data/fbank.pt")
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)
    data = Utterances(args.data)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 24, sampler=sampler, collate_fn=collate, num_workers=4, drop_last=True)
    model = DDP(Recognizer().to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
    ctc = nn.CTCLoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        stat = torch.zeros(2, device=device)
        for x, text, frames, lens in loader:
            loss = ctc(model(x.to(device)).transpose(0, 1), text.to(device), frames, lens)
            if any_rank(not torch.isfinite(loss), device):
                continue
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            stat += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} loss {(stat[0] / stat[1]).item():.4f}")
            torch.save(model.module.state_dict(), "rnnctc.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
