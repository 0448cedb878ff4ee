"""Masked language model on clinical notes with the HF Trainer."""
import os

from datasets import load_from_disk
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

BASE = "/models/bert-base-cased"
OUT = os.environ.get("OUT", "/ckpt/notes-mlm")


def main():
    args = TrainingArguments(
        output_dir=OUT,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=2,
        learning_rate=5e-5,
        warmup_steps=1000,
        num_train_epochs=8,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1000,
        save_steps=1000,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=False,
        fp16=True,
        dataloader_num_workers=4,
        report_to="tensorboard",
        seed=61,
    )
    set_seed(args.seed)
    tok = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForMaskedLM.from_pretrained(BASE)

    raw = load_from_disk("/data/notes")
    with args.main_process_first(local=False, desc="tokenise the notes"):
        ds = raw.map(
            lambda rows: tok(rows["text"], truncation=True, max_length=512),
            batched=True,
            remove_columns=raw["train"].column_names,
        )

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=ds["train"],
        eval_dataset=ds["validation"],
        data_collator=DataCollatorForLanguageModeling(tok, mlm_probability=0.15),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
    )
    result = trainer.train(resume_from_checkpoint=os.environ.get("RESUME") or None)
    trainer.save_model()
    trainer.save_state()
    metrics = dict(result.metrics, **trainer.evaluate())
    trainer.log_metrics("all", metrics)
    trainer.save_metrics("all", metrics)
    if trainer.is_world_process_zero():
        tok.save_pretrained(OUT)


if __name__ == "__main__":
    main()
