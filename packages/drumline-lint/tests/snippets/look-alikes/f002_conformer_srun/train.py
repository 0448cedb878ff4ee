import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torchaudio
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def init_from_slurm():
    rank = int(os.environ["SLURM_PROCID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=world_size)
    return rank, local_rank


def collate(batch):
    feats, tokens = zip(*batch)
    flen = torch.tensor([len(f) for f in feats])
    tlen = torch.tensor([len(t) for t in tokens])
    return pad_sequence(feats, batch_first=True), flen, torch.cat(tokens), tlen


class ASR(nn.Module):
    def __init__(self, vocab=1024):
        super().__init__()
        self.sub = nn.Linear(80 * 4, 256)
        self.enc = torchaudio.models.Conformer(256, 4, 1024, 12, 31)
        self.out = nn.Linear(256, vocab)

    def forward(self, x, lengths):
        b, t, f = x.shape
        x = self.sub(x[:, : t // 4 * 4].reshape(b, t // 4, 4 * f))
        h, lengths = self.enc(x, torch.div(lengths, 4, rounding_mode="floor").clamp(max=x.size(1)))
        return self.out(h).log_softmax(-1), lengths


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--feats", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    rank, local_rank = init_from_slurm()
    os.makedirs(args.out, exist_ok=True)

    data = torch.load(args.feats, map_location="cpu")  # list of (feats, tokens)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, 16, sampler=sampler, collate_fn=collate, num_workers=8)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(ASR()).cuda()
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    ctc = nn.CTCLoss(zero_infinity=True)

    for epoch in range(60):
        sampler.set_epoch(epoch)
        for feats, flen, tokens, tlen in loader:
            logp, out_len = model(feats.cuda(), flen.cuda())
            loss = ctc(logp.transpose(0, 1), tokens.cuda(), out_len, tlen.cuda())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), os.path.join(args.out, "last.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
