import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Captioner(nn.Module):
    def __init__(self, feat=2048, vocab=12_000, d=512):
        super().__init__()
        self.init_h = nn.Linear(feat, d)
        self.emb = nn.Embedding(vocab, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, feats, words):
        h0 = torch.tanh(self.init_h(feats)).unsqueeze(0)
        return self.out(self.rnn(self.emb(words), h0)[0])


class CaptionTrainer:
    def __init__(self, epochs=25, out="captioner.pt"):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", device_id=self.device)
        self.rank = dist.get_rank()
        torch.manual_seed(55 + self.rank)
        self.epochs, self.out = epochs, out
        self.model = DDP(Captioner().to(self.device), device_ids=[self.local_rank])
        self.opt = torch.optim.Adam(self.model.parameters(), lr=5e-4)

    def save(self, epoch):
        if self.rank == 0:
            tmp = self.out + ".tmp"
            torch.save({"weights": self.model.module.state_dict(), "epoch": epoch}, tmp)
            os.replace(tmp, self.out)
            dist.barrier()

    def fit(self, dataset):
        sampler = DistributedSampler(dataset, drop_last=True)
        loader = DataLoader(dataset, 64, sampler=sampler, drop_last=True)
        for epoch in range(self.epochs):
            sampler.set_epoch(epoch)
            self.model.train()
            for feats, words in loader:
                feats, words = feats.to(self.device), words.to(self.device)
                logits = self.model(feats, words[:, :-1])
                loss = nn.functional.cross_entropy(logits.transpose(1, 2), words[:, 1:], ignore_index=0)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            self.save(epoch)


if __name__ == "__main__":
    d = torch.load("flickr30k.pt", map_location="cpu", weights_only=True)
    trainer = CaptionTrainer()
    trainer.fit(TensorDataset(d["features"], d["captions"]))
    dist.destroy_process_group()
