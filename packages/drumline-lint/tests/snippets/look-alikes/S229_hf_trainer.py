# torchrun --nproc_per_node=4 hf_trainer.py
import numpy as np
from datasets import load_dataset
from transformers import (AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding,
                          EarlyStoppingCallback, Trainer, TrainingArguments)

BASE = "microsoft/deberta-v3-small"


def accuracy(p):
    return {"accuracy": float((np.argmax(p.predictions, axis=-1) == p.label_ids).mean())}


def main():
    args = TrainingArguments(
        output_dir="agnews",
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        num_train_epochs=4,
        learning_rate=3e-5,
        warmup_ratio=0.06,
        bf16=True,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
    )
    tok = AutoTokenizer.from_pretrained(BASE)
    with args.main_process_first(desc="map"):
        ds = load_dataset("ag_news").map(lambda b: tok(b["text"], truncation=True, max_length=192), batched=True)
    model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=4)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=ds["train"],
        eval_dataset=ds["test"],
        data_collator=DataCollatorWithPadding(tok),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(2)],
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model("agnews/best")
    if trainer.is_world_process_zero():
        tok.save_pretrained("agnews/best")
        print(metrics)


if __name__ == "__main__":
    main()
