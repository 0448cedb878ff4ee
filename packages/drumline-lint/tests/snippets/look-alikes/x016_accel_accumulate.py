# accelerate launch --multi_gpu --num_processes 8 accel_accumulate.py
import torch
from accelerate import Accelerator
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup


def main(epochs=3):
    accelerator = Accelerator(gradient_accumulation_steps=8, mixed_precision="bf16")
    data = load_from_disk("/data/reviews").with_format("torch")
    train = DataLoader(data["train"], batch_size=16, shuffle=True, drop_last=True)
    test = DataLoader(data["test"], batch_size=64)
    model = AutoModelForSequenceClassification.from_pretrained("roberta-base", num_labels=5)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    sched = get_linear_schedule_with_warmup(opt, 500, epochs * len(train) // 8)
    model, opt, train, test, sched = accelerator.prepare(model, opt, train, test, sched)

    for epoch in range(epochs):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                opt.step()
                sched.step()
                opt.zero_grad()
        model.eval()
        right = total = 0
        for batch in test:
            with torch.no_grad():
                pred = model(**batch).logits.argmax(-1)
            pred, label = accelerator.gather_for_metrics((pred, batch["labels"]))
            right += (pred == label).sum().item()
            total += len(label)
        accelerator.print(f"epoch {epoch}: {right / total:.4f} of {total}")
        accelerator.save_state(f"/ckpt/reviews/{epoch}")


if __name__ == "__main__":
    main()
