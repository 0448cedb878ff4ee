import os
from dataclasses import dataclass, field

import evaluate
import numpy as np
from datasets import load_dataset
from transformers import (AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq,
                          HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class DataArgs:
    model: str = field(default="google/pegasus-large")
    train_file: str = field(default="data/train.json")
    val_file: str = field(default="data/val.json")
    max_source: int = field(default=1024)
    max_target: int = field(default=128)


def main():
    data, targs = HfArgumentParser((DataArgs, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
    set_seed(targs.seed)

    tok = AutoTokenizer.from_pretrained(data.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(data.model)
    raw = load_dataset("json", data_files={"train": data.train_file, "val": data.val_file})

    def encode(rows):
        return tok(rows["article"], text_target=rows["summary"], max_length=data.max_source,
                   truncation=True)

    with targs.main_process_first(desc="tokenize"):
        ds = raw.map(encode, batched=True, remove_columns=raw["train"].column_names)

    rouge = evaluate.load("rouge", experiment_id=str(os.getpid()))

    def compute_metrics(pred):
        p, l = pred
        p = np.where(p != -100, p, tok.pad_token_id)
        l = np.where(l != -100, l, tok.pad_token_id)
        return rouge.compute(predictions=tok.batch_decode(p, skip_special_tokens=True),
                             references=tok.batch_decode(l, skip_special_tokens=True))

    trainer = Seq2SeqTrainer(
        model=model, args=targs, train_dataset=ds["train"], eval_dataset=ds["val"],
        data_collator=DataCollatorForSeq2Seq(tok, model=model),
        compute_metrics=compute_metrics if targs.predict_with_generate else None)

    last = get_last_checkpoint(targs.output_dir) if os.path.isdir(targs.output_dir) else None
    result = trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)

    metrics = trainer.evaluate(max_length=data.max_target, num_beams=4)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        tok.save_pretrained(targs.output_dir)


if __name__ == "__main__":
    main()
