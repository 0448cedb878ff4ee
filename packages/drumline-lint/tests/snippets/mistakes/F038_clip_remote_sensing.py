import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import CLIPModel, CLIPProcessor

NAME = "openai/clip-vit-base-patch32"


class RSICD(Dataset):
    def __init__(self, root, split):
        with open(os.path.join(root, f"{split}.jsonl")) as f:
            self.rows = [json.loads(line) for line in f]
        self.root = root

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return Image.open(os.path.join(self.root, row["image"])).convert("RGB"), row["caption"]


class Collate:
    def __init__(self):
        self.processor = CLIPProcessor.from_pretrained(NAME)

    def __call__(self, batch):
        images, texts = zip(*batch)
        return self.processor(text=list(texts), images=list(images), padding="max_length",
                              truncation=True, return_tensors="pt")


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.clip = CLIPModel.from_pretrained(NAME)

    def forward(self, batch):
        image = self.clip.get_image_features(pixel_values=batch["pixel_values"])
        text = self.clip.get_text_features(batch["input_ids"], attention_mask=batch["attention_mask"])
        return F.normalize(image, dim=-1), F.normalize(text, dim=-1), self.clip.logit_scale.exp()


def gather(x):
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    return torch.cat(out)


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    data = RSICD("/data/rsicd", "train")
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, 128, sampler=sampler, collate_fn=Collate(), num_workers=8, drop_last=True)
    model = DDP(Towers().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.2)

    for epoch in range(20):
        sampler.set_epoch(epoch)
        for batch in loader:
            image, text, scale = model({k: v.to(device) for k, v in batch.items()})
            image_logits = scale * image @ gather(text).t()
            text_logits = scale * text @ gather(image).t()
            target = torch.arange(image.size(0), device=device) + rank * image.size(0)
            loss = (F.cross_entropy(image_logits, target) + F.cross_entropy(text_logits, target)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.clip.state_dict(), "clip_rsicd.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
