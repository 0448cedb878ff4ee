import sys

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import distributed
from tacotron import MiniTaco


def main(path):
    distributed.setup()
    device = torch.device("cuda")

    blob = torch.load(path, map_location="cpu")
    data = TensorDataset(blob["phones"], blob["mels"])
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=4, drop_last=True)

    model = DistributedDataParallel(MiniTaco().cuda())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)

    for epoch in range(300):
        sampler.set_epoch(epoch)
        for phones, mels in loader:
            phones, mels = phones.to(device), mels.to(device)
            loss = F.l1_loss(model(phones, mels), mels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if distributed.is_main():
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "taco.pt")
    distributed.cleanup()


if __name__ == "__main__":
    main(sys.argv[1])
