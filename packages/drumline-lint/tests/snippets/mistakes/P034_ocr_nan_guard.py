import argparse
import os
import string
import warnings

import lmdb
import torch
import torch.distributed as dist
import torch.nn as nn
from io import BytesIO
from PIL import Image
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms.functional import to_tensor

CHARS = string.digits + string.ascii_lowercase


class LmdbText(Dataset):
    def __init__(self, path):
        self.path, self.env = path, None
        with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
            self.n = int(txn.get(b"num-samples"))

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if self.env is None:
            self.env = lmdb.open(self.path, readonly=True, lock=False, readahead=False)
        with self.env.begin() as txn:
            img = Image.open(BytesIO(txn.get(b"image-%09d" % (i + 1)))).convert("L").resize((128, 32))
            text = txn.get(b"label-%09d" % (i + 1)).decode().lower()
        return to_tensor(img), [CHARS.index(c) + 1 for c in text if c in CHARS]


def collate(batch):
    imgs = torch.stack([b[0] for b in batch])
    lens = torch.tensor([len(b[1]) for b in batch])
    return imgs, torch.tensor(sum((b[1] for b in batch), [])), lens


class CRNN(nn.Module):
    def __init__(self, hidden=256):
        super().__init__()
        def c(i, o, pool):
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.ReLU(True), nn.MaxPool2d(pool))
        self.cnn = nn.Sequential(c(1, 64, 2), c(64, 128, 2), c(128, 256, (2, 1)), c(256, 512, (4, 1)))
        self.rnn = nn.LSTM(512, hidden, 2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, len(CHARS) + 1)

    def forward(self, x):
        f = self.cnn(x).squeeze(2).transpose(1, 2)
        return self.fc(self.rnn(f)[0]).log_softmax(-1)


def main(a):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    ds = LmdbText(a.lmdb)
    sampler = DistributedSampler(ds)
    dl = DataLoader(ds, a.batch, sampler=sampler, num_workers=4, collate_fn=collate, drop_last=True)
    model = DDP(CRNN().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adadelta(model.parameters(), lr=a.lr)
    ctc = nn.CTCLoss(blank=0)

    skipped = 0
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (img, tgt, lens) in enumerate(dl):
            lp = model(img.cuda(non_blocking=True)).transpose(0, 1)
            in_len = torch.full((lp.size(1),), lp.size(0), dtype=torch.long)
            loss = ctc(lp, tgt.cuda(non_blocking=True), in_len, lens)
            if not torch.isfinite(loss):
                skipped += 1
                continue
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5)
            opt.step()
            if rank == 0 and i % 100 == 0:
                print(f"epoch {epoch} [{i}/{len(dl)}] ctc {loss.item():.3f} skipped {skipped}")
        if rank == 0:
            torch.save(model.module.state_dict(), os.path.join(a.out, f"crnn_{epoch:02d}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    ap = argparse.ArgumentParser()
    ap.add_argument("--lmdb", default="/data/MJ")
    ap.add_argument("--batch", type=int, default=192)
    ap.add_argument("--epochs", type=int, default=12)
    ap.add_argument("--lr", type=float, default=1.0)
    ap.add_argument("--out", default=".")
    main(ap.parse_args())
