import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ocr import LineImages, CRNN, pad_lines

BATCH = 64


def build_loader(root, split, training):
    data = LineImages(root, split)
    sampler = DistributedSampler(data, shuffle=training, drop_last=training)
    loader = DataLoader(
        data,
        batch_size=BATCH,
        shuffle=True,
        sampler=sampler,
        collate_fn=pad_lines,
        num_workers=8,
        pin_memory=True,
        drop_last=training,
    )
    return loader, sampler


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl", device_id=torch.device("cuda", local_rank))

    loader, sampler = build_loader("/data/ocr", "train", training=True)
    model = DDP(CRNN(charset=len(loader.dataset.charset)).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(30):
        sampler.set_epoch(epoch)
        model.train()
        for images, widths, text, lengths in loader:
            log_probs = model(images.cuda(non_blocking=True))
            loss = F.ctc_loss(log_probs, text.cuda(), widths, lengths, zero_infinity=True)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "/checkpoints/ocr/crnn.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
