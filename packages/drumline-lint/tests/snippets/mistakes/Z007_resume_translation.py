import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from nmt import Bitext, Transformer, collate, label_smoothed_nll


def save(path, model, optimizer, epoch):
    tmp = path + ".tmp"
    torch.save({"model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch}, tmp)
    os.replace(tmp, path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bitext", default="/data/nmt/de-en")
    parser.add_argument("--checkpoint", default="/checkpoints/nmt/last.pt")
    parser.add_argument("--epochs", type=int, default=25)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    model = Transformer(vocab=32000, dim=1024, layers=12).cuda(local_rank)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-4, betas=(0.9, 0.98))

    first_epoch = 0
    if os.path.exists(args.checkpoint):
        checkpoint = torch.load(args.checkpoint)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"] + 1
    dist.barrier()

    dataset = Bitext(args.bitext)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=48, sampler=sampler, collate_fn=collate, num_workers=4)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for src, tgt in loader:
            src, tgt = src.cuda(local_rank), tgt.cuda(local_rank)
            loss = label_smoothed_nll(model(src, tgt[:, :-1]), tgt[:, 1:])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            save(args.checkpoint, model, optimizer, epoch)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
