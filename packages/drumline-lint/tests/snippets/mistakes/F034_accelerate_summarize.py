"""Fine-tune BART for dialogue summaries with Accelerate. `accelerate launch F034_accelerate_summarize.py`"""
import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq,
                          get_linear_schedule_with_warmup)

MODEL = "facebook/bart-base"
EPOCHS = 4


def tokenize(batch, tokenizer):
    enc = tokenizer(batch["dialogue"], max_length=512, truncation=True)
    enc["labels"] = tokenizer(text_target=batch["summary"], max_length=96, truncation=True)["input_ids"]
    return enc


def main():
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with accelerator.main_process_first():
        raw = load_dataset("samsum")
        data = raw.map(tokenize, batched=True, fn_kwargs={"tokenizer": tokenizer},
                       remove_columns=raw["train"].column_names)

    model = AutoModelForSeq2SeqLM.from_pretrained(MODEL)
    collate = DataCollatorForSeq2Seq(tokenizer, model)
    train_loader = DataLoader(data["train"], batch_size=16, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(data["validation"], batch_size=16, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, 100, EPOCHS * len(train_loader) // 2)
    rouge = evaluate.load("rouge")

    for epoch in range(EPOCHS):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()

        model.eval()
        for batch in val_loader:
            with torch.no_grad():
                tokens = accelerator.unwrap_model(model).generate(
                    batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=96)
            tokens = accelerator.pad_across_processes(tokens, dim=1, pad_index=tokenizer.pad_token_id)
            labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
            if accelerator.is_main_process:
                tokens, labels = accelerator.gather_for_metrics((tokens, labels))
                labels = labels.masked_fill(labels == -100, tokenizer.pad_token_id)
                rouge.add_batch(predictions=tokenizer.batch_decode(tokens, skip_special_tokens=True),
                                references=tokenizer.batch_decode(labels, skip_special_tokens=True))
        if accelerator.is_main_process:
            print(epoch, rouge.compute(), flush=True)

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained("bart-samsum", save_function=accelerator.save,
                                                    is_main_process=accelerator.is_main_process)


if __name__ == "__main__":
    main()
