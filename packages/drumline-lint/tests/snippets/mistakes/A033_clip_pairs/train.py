import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from losses import clip_loss
from pairs import pair_loader
from towers import DualEncoder
from world import World


def main():
    world = World(seed=13)
    loader, sampler = pair_loader("cc3m.pt", batch_size=256)
    model = DDP(DualEncoder().to(world.device), device_ids=[world.local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.2)
    for epoch in range(32):
        sampler.set_epoch(epoch)
        for image, text in loader:
            img_f, txt_f, scale = model(image.to(world.device), text.to(world.device))
            loss = clip_loss(img_f, txt_f, scale)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if world.rank == 0:
            torch.save(model.module.state_dict(), f"clip_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
