import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from qa.features import SquadFeatures


def build_features(tokenizer, cache, rank):
    if rank != 0:
        dist.barrier()
    if os.path.exists(cache):
        feats = torch.load(cache, weights_only=False)
    else:
        feats = SquadFeatures.from_json("data/train-v2.0.json", tokenizer, max_len=384, stride=128)
        torch.save(feats, cache)
    if rank == 0:
        dist.barrier()
    return feats


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    tokenizer = AutoTokenizer.from_pretrained("bert-large-uncased")
    train = build_features(tokenizer, "/shared/cache/squad2_384.pt", rank)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=12, sampler=sampler, num_workers=2, pin_memory=True)

    model = AutoModelForQuestionAnswering.from_pretrained("bert-large-uncased").cuda()
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for step, batch in enumerate(loader):
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if rank == 0 and step % 200 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")

    if rank == 0:
        model.module.save_pretrained("/shared/out/squad2")
        tokenizer.save_pretrained("/shared/out/squad2")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
