"""Image captioning. accelerate launch --multi_gpu --num_processes 4 caption_train.py"""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GitForCausalLM, get_cosine_schedule_with_warmup

from captions import CaptionSet, collate

EPOCHS = 10
ACCUM = 2


def main():
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=ACCUM)
    set_seed(99)

    loader = DataLoader(CaptionSet("/data/coco-captions"), batch_size=32, shuffle=True,
                        collate_fn=collate, num_workers=6, drop_last=True)
    model = GitForCausalLM.from_pretrained("/models/git-base")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # the prepared scheduler steps once per process, hence the factor
    updates = EPOCHS * -(-len(loader) // ACCUM) * accelerator.num_processes
    scheduler = accelerator.prepare(
        get_cosine_schedule_with_warmup(optimizer, updates // 20, updates))

    for epoch in range(EPOCHS):
        model.train()
        for step, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if step % 100 == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}")

        accelerator.wait_for_everyone()
        accelerator.unwrap_model(model).save_pretrained(
            f"out/git-{epoch}",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
