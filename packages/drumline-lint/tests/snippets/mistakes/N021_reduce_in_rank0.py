import logging
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from ocr.crnn import CRNN
from ocr.lines import LineDataset, ctc_collate

log = logging.getLogger("ocr")


def reduce_mean(t):
    t = t.detach().clone()
    dist.all_reduce(t, op=dist.ReduceOp.SUM)
    return t / dist.get_world_size()


def train_epoch(model, loader, ctc, opt, device, epoch, rank):
    model.train()
    for i, (img, tgt, tgt_len) in enumerate(loader):
        img, tgt, tgt_len = img.to(device), tgt.to(device), tgt_len.to(device)
        logp = model(img).log_softmax(2)
        in_len = torch.full((img.size(0),), logp.size(0), dtype=torch.long, device=device)
        loss = ctc(logp, tgt, in_len, tgt_len)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        if rank == 0 and i % 50 == 0:
            avg = reduce_mean(loss)
            log.info("epoch %d iter %d loss %.4f", epoch, i, avg.item())


def main():
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    ds = LineDataset("/data/iam")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 64, sampler=sampler, collate_fn=ctc_collate, num_workers=4, drop_last=True)
    model = DDP(CRNN(80).to(device), device_ids=[local_rank])
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    ctc = torch.nn.CTCLoss(zero_infinity=True)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, ctc, opt, device, epoch, rank)
        if rank == 0:
            torch.save(model.module.state_dict(), "crnn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
