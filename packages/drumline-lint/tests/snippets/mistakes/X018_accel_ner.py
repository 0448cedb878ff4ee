# accelerate launch --multi_gpu --num_processes 8 accel_ner.py
import torch
from accelerate import Accelerator
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoModelForTokenClassification, get_linear_schedule_with_warmup

SETTINGS = {
    "model": "xlm-roberta-base",
    "data": "/data/ner/tokenized",
    "labels": 9,
    "batch": 32,
    "epochs": 4,
    "lr": 3e-5,
}


def build_loader(accelerator, split, train):
    ds = load_from_disk(SETTINGS["data"])[split].with_format("torch")
    ds = ds.shard(num_shards=accelerator.num_processes, index=accelerator.process_index)
    return DataLoader(ds, batch_size=SETTINGS["batch"], shuffle=train, drop_last=train)


def main():
    accelerator = Accelerator(mixed_precision="bf16")
    loader = build_loader(accelerator, "train", train=True)
    model = AutoModelForTokenClassification.from_pretrained(SETTINGS["model"], num_labels=SETTINGS["labels"])
    opt = torch.optim.AdamW(model.parameters(), lr=SETTINGS["lr"])
    model, opt, loader = accelerator.prepare(model, opt, loader)
    total = len(loader) * SETTINGS["epochs"]
    sched = get_linear_schedule_with_warmup(opt, total // 10, total)

    for epoch in range(SETTINGS["epochs"]):
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            opt.step()
            sched.step()
            opt.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.3f}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        "/ckpt/ner", is_main_process=accelerator.is_main_process, save_function=accelerator.save)


if __name__ == "__main__":
    main()
