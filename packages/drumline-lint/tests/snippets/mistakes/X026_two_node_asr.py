"""Speech model on two machines with 8 GPUs each.

On both machines:
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=asr-0:29500 two_node_asr.py
"""
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("asr")


class Acoustic(nn.Module):
    def __init__(self, vocab=64):
        super().__init__()
        self.rnn = nn.LSTM(80, 512, num_layers=4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(1024, vocab)

    def forward(self, mel):
        return self.head(self.rnn(mel)[0]).log_softmax(-1)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device(f"cuda:{rank}")
    torch.cuda.set_device(device)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    blob = torch.load("/shared/asr/train.pt", map_location="cpu")
    data = TensorDataset(blob["mel"], blob["text"], blob["mel_len"], blob["text_len"])
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=4)
    model = DDP(Acoustic().to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ctc = nn.CTCLoss(zero_infinity=True)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        for mel, text, mel_len, text_len in loader:
            logp = model(mel.to(device)).transpose(0, 1)
            loss = ctc(logp, text.to(device), mel_len, text_len)
            opt.zero_grad()
            loss.backward()
            opt.step()
        log.info("epoch %d loss %.3f", epoch, loss.item())
    if rank == 0:
        torch.save(model.module.state_dict(), "/shared/asr/last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
