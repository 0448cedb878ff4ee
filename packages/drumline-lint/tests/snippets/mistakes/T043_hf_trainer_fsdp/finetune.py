import logging
from dataclasses import dataclass, field

import transformers
from datasets import load_dataset
from transformers import (AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, HfArgumentParser,
                          Trainer, TrainingArguments)

logger = logging.getLogger(__name__)


@dataclass
class ModelArgs:
    model_name: str = field(default="mistralai/Mistral-7B-v0.1")
    max_len: int = field(default=2048)


@dataclass
class DataArgs:
    train_file: str = field(default="data/train.jsonl")
    eval_file: str = field(default="data/eval.jsonl")


def main():
    m_args, d_args, t_args = HfArgumentParser((ModelArgs, DataArgs, TrainingArguments)).parse_args_into_dataclasses()
    logging.basicConfig(level=t_args.get_process_log_level())
    transformers.set_seed(t_args.seed)

    tok = AutoTokenizer.from_pretrained(m_args.model_name)
    tok.pad_token = tok.eos_token
    raw = load_dataset("json", data_files={"train": d_args.train_file, "eval": d_args.eval_file})

    def encode(batch):
        return tok([p + r + tok.eos_token for p, r in zip(batch["prompt"], batch["response"])],
                   truncation=True, max_length=m_args.max_len)

    with t_args.main_process_first(desc="tokenize"):
        data = raw.map(encode, batched=True, num_proc=16, remove_columns=raw["train"].column_names)

    model = AutoModelForCausalLM.from_pretrained(m_args.model_name, use_cache=False)
    trainer = Trainer(
        model=model,
        args=t_args,
        train_dataset=data["train"],
        eval_dataset=data["eval"],
        data_collator=DataCollatorForLanguageModeling(tok, mlm=False, pad_to_multiple_of=64),
    )
    result = trainer.train(resume_from_checkpoint=t_args.resume_from_checkpoint)
    logger.info("train loss %.4f", result.training_loss)

    if trainer.is_world_process_zero():
        metrics = trainer.evaluate()
        trainer.save_metrics("eval", metrics)
        trainer.save_model(t_args.output_dir)
        tok.save_pretrained(t_args.output_dir)


if __name__ == "__main__":
    main()
