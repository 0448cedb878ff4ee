"""torchrun --standalone --nproc_per_node=4 sentiment.py"""
import os

# every process sees only its own GPU, as cuda:0
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

from reviews import BiGRU, ReviewTokens  # noqa: E402


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    model = BiGRU(vocab=50_000, hidden=512).cuda()
    model = DDP(model, device_ids=[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    data = ReviewTokens("/data/yelp/train.bin")
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=256, sampler=sampler, num_workers=4, pin_memory=True,
                        drop_last=True)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        for tokens, stars in loader:
            tokens, stars = tokens.cuda(non_blocking=True), stars.cuda(non_blocking=True)
            loss = F.cross_entropy(model(tokens), stars)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "sentiment.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
