import os
from pathlib import Path

import sentencepiece as spm
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nmt.model import Seq2Seq

CACHE = Path("/shared/cache/wmt_en_de.pt")


def encode_corpus(src, tgt, model_file, max_len=128):
    sp = spm.SentencePieceProcessor(model_file=model_file)
    pairs = []
    with open(src) as fs, open(tgt) as ft:
        for a, b in zip(fs, ft):
            a, b = sp.encode(a.strip())[:max_len], sp.encode(b.strip())[:max_len]
            pairs.append((a + [0] * (max_len - len(a)), b + [0] * (max_len - len(b))))
    x, y = zip(*pairs)
    return torch.tensor(x), torch.tensor(y)


def load_corpus():
    if dist.get_rank() == 0:
        if not CACHE.exists():
            CACHE.parent.mkdir(parents=True, exist_ok=True)
            torch.save(encode_corpus("train.en", "train.de", "bpe.model"), CACHE)
        dist.barrier()
    x, y = torch.load(CACHE, map_location="cpu")
    return TensorDataset(x, y)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    dataset = load_corpus()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=2)
    model = DDP(Seq2Seq(vocab=32000).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=7e-4, betas=(0.9, 0.98))
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for src, tgt in loader:
            loss = model(src.cuda(), tgt.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"nmt_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
