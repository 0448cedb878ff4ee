"""Instruction tuning with the HF Trainer and DeepSpeed ZeRO-3.

torchrun --nproc_per_node=8 F037_hf_trainer_zero3_sft.py --train data/alpaca.jsonl --out out/mistral-sft
"""
import argparse

from datasets import load_dataset
from transformers import (AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer,
                          TrainingArguments)

PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n"

ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": True},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def encode(row, tokenizer, max_length):
    prompt = tokenizer(PROMPT.format(instruction=row["instruction"]))["input_ids"]
    answer = tokenizer(row["output"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return {
        "input_ids": (prompt + answer)[:max_length],
        "labels": ([-100] * len(prompt) + answer)[:max_length],
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="mistralai/Mistral-7B-v0.1")
    parser.add_argument("--train", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--max_length", type=int, default=2048)
    args = parser.parse_args()

    train_args = TrainingArguments(
        output_dir=args.out,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_train_epochs=3,
        learning_rate=1e-5,
        lr_scheduler_type="cosine",
        warmup_ratio=0.03,
        bf16=True,
        logging_steps=10,
        save_strategy="no",
        gradient_checkpointing=True,
        deepspeed=ZERO3,
        report_to="none",
    )

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.unk_token
    model = AutoModelForCausalLM.from_pretrained(args.model)
    model.config.use_cache = False

    with train_args.main_process_first(desc="tokenize"):
        data = load_dataset("json", data_files=args.train, split="train")
        data = data.map(encode, fn_kwargs={"tokenizer": tokenizer, "max_length": args.max_length},
                        remove_columns=data.column_names)

    trainer = Trainer(
        model=model,
        args=train_args,
        train_dataset=data,
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
    )
    trainer.train()

    if trainer.is_world_process_zero():
        trainer.save_model(args.out)
        tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
