# accelerate launch --multi_gpu --num_processes 4 accelerate_vit.py
import timm
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import OxfordIIITPet


def main(epochs=15, bs=32):
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, project_dir="runs/pets")
    set_seed(3)
    tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()])
    ev = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor()])
    with accelerator.main_process_first():
        train = OxfordIIITPet("data", split="trainval", transform=tf, download=True)
        test = OxfordIIITPet("data", split="test", transform=ev, download=True)
    train_dl = DataLoader(train, bs, shuffle=True, num_workers=4, drop_last=True)
    test_dl = DataLoader(test, 64, num_workers=4)
    model = timm.create_model("vit_small_patch16_224", pretrained=True, num_classes=37)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, opt, train_dl, test_dl = accelerator.prepare(model, opt, train_dl, test_dl)

    for epoch in range(epochs):
        model.train()
        for x, y in train_dl:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                opt.step()
                opt.zero_grad()
        model.eval()
        good = total = 0
        for x, y in test_dl:
            with torch.no_grad():
                pred = model(x).argmax(-1)
            pred, y = accelerator.gather_for_metrics((pred, y))
            good += (pred == y).sum().item()
            total += y.numel()
        accelerator.print(f"epoch {epoch}: {good / total:.4f} ({total})")
        accelerator.save_state(f"runs/pets/epoch{epoch}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "runs/pets/final.pt")


if __name__ == "__main__":
    main()
