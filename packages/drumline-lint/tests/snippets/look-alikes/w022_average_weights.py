# Local SGD over a slow network: average the weights every AVERAGE_EVERY steps.
# torchrun --nnodes=4 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint=pc1:29400 local_sgd.py
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from handwriting import Words, WordNet

AVERAGE_EVERY = 16


@torch.no_grad()
def average(model):
    flat = nn.utils.parameters_to_vector(model.parameters())
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    nn.utils.vector_to_parameters(flat, model.parameters())


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")

    model = WordNet(norm="layer").to(device)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.02)

    words = Words("/data/iam")
    sampler = DistributedSampler(words, drop_last=True)
    loader = DataLoader(words, batch_size=64, sampler=sampler, num_workers=4, drop_last=True)

    step = 0
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for image, word in loader:
            loss = F.cross_entropy(model(image.to(device)), word.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % AVERAGE_EVERY == 0:
                average(model)
        average(model)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, step {step}, loss {loss.item():.4f}")
            torch.save(model.state_dict(), "words.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
