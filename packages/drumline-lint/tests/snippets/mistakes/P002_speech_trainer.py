import os
import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torchaudio
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

logger = logging.getLogger("asr")


@dataclass
class TrainConfig:
    root: str = "/data/librispeech"
    epochs: int = 20
    batch_size: int = 16
    lr: float = 3e-4
    num_workers: int = 8
    log_every: int = 50
    ckpt_dir: str = "runs/asr"


def collate(batch):
    waves, texts = [], []
    for wav, _sr, text, *_ in batch:
        waves.append(wav.squeeze(0))
        texts.append(torch.tensor([ord(c) % 64 + 1 for c in text.lower()]))
    wlen = torch.tensor([len(w) for w in waves])
    tlen = torch.tensor([len(t) for t in texts])
    return pad_sequence(waves, True), wlen, pad_sequence(texts, True), tlen


class AsrTrainer:
    def __init__(self, cfg, model):
        self.cfg = cfg
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank)
        self.model = DistributedDataParallel(model.to(self.device), device_ids=[self.local_rank])
        self.loader = self._make_loader()
        self.ctc = nn.CTCLoss(zero_infinity=True)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.step = 0

    def _make_loader(self):
        ds = torchaudio.datasets.LIBRISPEECH(self.cfg.root, url="train-clean-100")
        return DataLoader(
            ds, batch_size=self.cfg.batch_size, shuffle=True, drop_last=True,
            num_workers=self.cfg.num_workers, collate_fn=collate, pin_memory=True)

    def train_epoch(self, epoch):
        self.model.train()
        for waves, wlen, texts, tlen in self.loader:
            waves, texts = waves.to(self.device), texts.to(self.device)
            log_probs, out_len = self.model(waves, wlen.to(self.device))
            loss = self.ctc(log_probs.transpose(0, 1), texts, out_len, tlen)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.opt.step()
            self.step += 1
            if self.rank == 0 and self.step % self.cfg.log_every == 0:
                logger.info("epoch %d step %d loss %.3f", epoch, self.step, loss.item())

    def save(self, epoch):
        if self.rank != 0:
            return
        os.makedirs(self.cfg.ckpt_dir, exist_ok=True)
        torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "epoch": epoch},
                   os.path.join(self.cfg.ckpt_dir, f"epoch{epoch}.pt"))

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.train_epoch(epoch)
            self.save(epoch)


class SmallConformer(nn.Module):
    def __init__(self, vocab=65, dim=256):
        super().__init__()
        self.melspec = torchaudio.transforms.MelSpectrogram(n_mels=80)
        self.enc = torchaudio.models.Conformer(80, 4, dim, 6, 31)
        self.head = nn.Linear(80, vocab)

    def forward(self, x, lengths):
        feats = self.melspec(x).transpose(1, 2)
        flen = (lengths // 200 + 1).clamp(max=feats.size(1))
        out, olen = self.enc(feats, flen)
        return self.head(out).log_softmax(-1), olen


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    AsrTrainer(TrainConfig(), SmallConformer()).fit()
    dist.destroy_process_group()
