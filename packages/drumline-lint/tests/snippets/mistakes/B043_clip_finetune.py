import os
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import CLIPVisionModel, CLIPImageProcessor


class Products(Dataset):
    def __init__(self, root, processor):
        self.items = [(p, int(p.parent.name)) for p in sorted(Path(root).glob("*/*.jpg"))]
        self.processor = processor

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        path, y = self.items[i]
        px = self.processor(Image.open(path).convert("RGB"), return_tensors="pt").pixel_values[0]
        return px, y


class ProductTagger(torch.nn.Module):
    def __init__(self, name, classes):
        super().__init__()
        self.vision = CLIPVisionModel.from_pretrained(name)
        self.vision.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        self.fc = torch.nn.Linear(self.vision.config.hidden_size, classes)

    def forward(self, px):
        return self.fc(self.vision(pixel_values=px).pooler_output)


def main():
    name = os.environ.get("CLIP", "openai/clip-vit-large-patch14")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(1 + dist.get_rank())
    device = torch.device("cuda", local_rank)

    data = Products("data/products", CLIPImageProcessor.from_pretrained(name))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=8, drop_last=True)
    model = ProductTagger(name, classes=500).to(device)
    model = DDP(model, device_ids=[local_rank], find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.05)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        model.train()
        seen = torch.zeros(2, device=device)
        for px, y in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(px.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            seen += torch.tensor([loss.item(), 1.0], device=device)
        dist.all_reduce(seen)
        if dist.get_rank() == 0:
            print(epoch, (seen[0] / seen[1]).item())
            torch.save(model.module.state_dict(), "tagger.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
