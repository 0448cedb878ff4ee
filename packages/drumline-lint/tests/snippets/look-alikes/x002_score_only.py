# Compare checkpoints on the test set: torchrun --standalone --nproc_per_node=4 score_only.py
import glob
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Scorer:
    def __init__(self, path):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        blob = torch.load(path, map_location="cpu")
        ids = torch.arange(len(blob["y"]))
        data = TensorDataset(blob["x"], blob["y"], ids)
        self.sampler = DistributedSampler(data, shuffle=False)
        self.loader = DataLoader(data, batch_size=512, sampler=self.sampler)
        self.net = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 5)).cuda().eval()
        self.n = len(data)

    @torch.no_grad()
    def run(self, checkpoints):
        for epoch, name in enumerate(checkpoints):
            self.net.load_state_dict(torch.load(name, map_location="cpu"))
            right = torch.zeros(self.n, device="cuda")
            for x, y, ids in self.loader:
                pred = self.net(x.cuda()).argmax(-1)
                right[ids.cuda()] = (pred == y.cuda()).float()
            dist.all_reduce(right, op=dist.ReduceOp.MAX)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: accuracy {right.mean().item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("nccl")
    Scorer("/data/test.pt").run(sorted(glob.glob("/ckpt/scorer_*.pt")))
    dist.destroy_process_group()
