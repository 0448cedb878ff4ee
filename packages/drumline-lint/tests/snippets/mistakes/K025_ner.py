import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification
from transformers import AutoTokenizer
from datasets import load_from_disk


def collect(t):
    world = dist.get_world_size()
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t)
    return torch.cat(parts)


@torch.no_grad()
def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    tok = AutoTokenizer.from_pretrained("/models/ner-deberta")
    model = AutoModelForTokenClassification.from_pretrained("/models/ner-deberta")
    model = model.to(local_rank).eval()
    test = load_from_disk("/data/ner/test_tok")
    mine = Subset(test, list(range(rank, len(test), world)))
    loader = DataLoader(mine, batch_size=32,
                        collate_fn=DataCollatorForTokenClassification(tok))

    pred, gold = [], []
    for batch in loader:
        batch = {k: v.to(local_rank) for k, v in batch.items()}
        out = model(input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"]).logits.argmax(-1)
        keep = batch["labels"] != -100
        pred.append(out[keep])
        gold.append(batch["labels"][keep])
    pred = collect(torch.cat(pred))
    gold = collect(torch.cat(gold))
    if rank == 0:
        entity = gold > 0
        tp = ((pred == gold) & entity).sum().item()
        p = tp / max((pred > 0).sum().item(), 1)
        r = tp / max(entity.sum().item(), 1)
        print(f"token F1 {2 * p * r / max(p + r, 1e-9):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
