# torchrun --standalone --nproc_per_node=8 text_trainer.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class BagOfWords(nn.Module):
    def __init__(self, vocab=30000, dim=256, classes=14):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, tokens):
        return self.out(self.emb(tokens))


class Trainer:
    def __init__(self, data_file, epochs):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        self.epochs = epochs
        blob = torch.load(data_file, map_location="cpu")
        dataset = TensorDataset(blob["tokens"], blob["labels"])
        self.sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
        self.loader = DataLoader(dataset, batch_size=256, sampler=self.sampler, drop_last=True)
        self.model = DistributedDataParallel(BagOfWords().cuda(), device_ids=[self.local_rank])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def step(self, tokens, labels):
        loss = F.cross_entropy(self.model(tokens.cuda()), labels.cuda())
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        return loss.detach()

    def fit(self):
        for epoch in range(self.epochs):
            running = torch.zeros((), device="cuda")
            for tokens, labels in self.loader:
                running += self.step(tokens, labels)
            dist.all_reduce(running)
            if dist.get_rank() == 0:
                mean = running.item() / (len(self.loader) * dist.get_world_size())
                print(f"{epoch:3d}  {mean:.4f}", flush=True)


if __name__ == "__main__":
    trainer = Trainer("/data/dbpedia.pt", epochs=30)
    trainer.fit()
    if dist.get_rank() == 0:
        torch.save(trainer.model.module.state_dict(), "bow.pt")
    dist.destroy_process_group()
