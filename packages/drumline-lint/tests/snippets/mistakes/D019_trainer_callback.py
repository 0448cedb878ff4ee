"""Summarisation fine-tuning with the HF Trainer and extra early evaluations."""
import os

import numpy as np
from datasets import load_from_disk
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

MODEL = "/models/t5-base"
EARLY_STEPS = {50, 100, 200, 400}


class EarlyLook(TrainerCallback):
    """Evaluate a few times in the first steps, where the epoch-wise evaluation sees nothing."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step in EARLY_STEPS:
            metrics = self.trainer.evaluate(metric_key_prefix="early")
            print(f"step {state.global_step}: {metrics['early_loss']:.3f}", flush=True)
        return control


def main():
    tok = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForSeq2SeqLM.from_pretrained(MODEL)
    args = Seq2SeqTrainingArguments(
        output_dir=os.environ.get("OUT", "t5-sum"),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-4,
        num_train_epochs=3,
        eval_strategy="epoch",
        save_strategy="epoch",
        bf16=True,
        ddp_find_unused_parameters=False,
        logging_steps=50,
        report_to=[],
        seed=13,
    )

    raw = load_from_disk("/data/news_summaries")

    def encode(rows):
        enc = tok(["summarize: " + t for t in rows["article"]], max_length=768, truncation=True)
        enc["labels"] = tok(text_target=rows["summary"], max_length=128, truncation=True)["input_ids"]
        return enc

    with args.main_process_first(desc="tokenise"):
        ds = raw.map(encode, batched=True, remove_columns=raw["train"].column_names)

    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=ds["train"],
        eval_dataset=ds["validation"],
        data_collator=DataCollatorForSeq2Seq(tok, model=model),
    )
    trainer.add_callback(EarlyLook(trainer))
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        lengths = [len(x) for x in ds["train"]["labels"]]
        print("mean target length", np.mean(lengths))


if __name__ == "__main__":
    main()
