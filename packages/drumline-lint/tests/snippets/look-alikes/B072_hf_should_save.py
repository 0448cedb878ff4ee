"""torchrun --nproc_per_node 4 train_lm.py --output_dir out --per_device_train_batch_size 8"""
import json
import os
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArgs:
    model: str = field(default="distilgpt2")
    train_file: str = field(default="data/train.txt")
    dev_file: str = field(default="data/dev.txt")
    max_length: int = field(default=256)


class ReportingTrainer(Trainer):
    @property
    def should_write(self):
        return self.args.should_save

    def write_report(self, name, metrics):
        if not self.should_write:
            return
        with open(os.path.join(self.args.output_dir, name), "w") as f:
            json.dump(metrics, f, indent=2)


def main():
    sargs, targs = HfArgumentParser((ScriptArgs, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(targs.seed)
    tok = AutoTokenizer.from_pretrained(sargs.model)
    tok.pad_token = tok.eos_token
    raw = load_dataset("text", data_files={"train": sargs.train_file, "dev": sargs.dev_file})

    def encode(rows):
        return tok(rows["text"], truncation=True, max_length=sargs.max_length)

    with targs.main_process_first(desc="tokenize"):
        data = raw.map(encode, batched=True, remove_columns=["text"])
    trainer = ReportingTrainer(
        model=AutoModelForCausalLM.from_pretrained(sargs.model),
        args=targs,
        train_dataset=data["train"],
        eval_dataset=data["dev"],
        data_collator=DataCollatorForLanguageModeling(tok, mlm=False),
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.write_report("eval.json", metrics)
    if targs.should_save:
        tok.save_pretrained(targs.output_dir)


if __name__ == "__main__":
    main()
