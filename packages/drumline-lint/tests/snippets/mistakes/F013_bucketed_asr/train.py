import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchaudio
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from samplers import DistributedBucketSampler


class Manifest(Dataset):
    def __init__(self, path):
        with open(path) as f:
            self.items = [json.loads(line) for line in f]
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_mels=80)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        wav, _ = torchaudio.load(self.items[i]["audio"])
        feats = self.mel(wav[0]).clamp_min(1e-8).log().t()
        return feats, torch.tensor(self.items[i]["tokens"])


def collate(batch):
    feats, tokens = zip(*batch)
    flen = torch.tensor([f.size(0) for f in feats])
    tlen = torch.tensor([t.numel() for t in tokens])
    return pad_sequence(feats, batch_first=True), flen, pad_sequence(tokens, batch_first=True), tlen


class BLSTMCTC(torch.nn.Module):
    def __init__(self, vocab=5000):
        super().__init__()
        self.rnn = torch.nn.LSTM(80, 512, 5, batch_first=True, bidirectional=True, dropout=0.2)
        self.out = torch.nn.Linear(1024, vocab)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).log_softmax(-1)


def main(manifest, out_dir, epochs=40):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    data = Manifest(manifest)
    batches = DistributedBucketSampler([it["duration"] for it in data.items])
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=6, pin_memory=True)

    model = DistributedDataParallel(BLSTMCTC().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    for epoch in range(epochs):
        for feats, flen, tokens, tlen in loader:
            logp = model(feats.cuda(non_blocking=True))
            loss = F.ctc_loss(logp.transpose(0, 1), tokens.cuda(), flen, tlen, zero_infinity=True)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), os.path.join(out_dir, f"epoch{epoch}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
