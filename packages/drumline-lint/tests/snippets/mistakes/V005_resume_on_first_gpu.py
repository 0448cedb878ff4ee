import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from lm.corpus import PackedTokens
from lm.gpt import GPT, GPTConfig

CKPT = "/scratch/gpt-1b/last.pt"


def save(model, optimizer, step):
    if dist.get_rank() == 0:
        tmp = CKPT + ".tmp"
        torch.save({"model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step}, tmp)
        os.replace(tmp, CKPT)


def resume(model, optimizer):
    if not os.path.exists(CKPT):
        return 0
    state = torch.load(CKPT)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    net = GPT(GPTConfig(layers=24, width=2048, heads=16)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-4, betas=(0.9, 0.95))
    step = resume(net, optimizer)
    model = DDP(net, device_ids=[local_rank], gradient_as_bucket_view=True)

    dataset = PackedTokens("/data/tokens", seq_len=2048)
    sampler = DistributedSampler(dataset, seed=17, drop_last=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2)
    epoch, skip = divmod(step, len(loader))
    while step < 100_000:
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            if i < skip:
                continue
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x.cuda(), y.cuda())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 1000 == 0:
                save(model, optimizer, step)
        epoch, skip = epoch + 1, 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
