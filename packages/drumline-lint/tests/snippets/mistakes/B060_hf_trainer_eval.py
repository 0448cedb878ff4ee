"""torchrun --nproc_per_node 4 run_ner.py --train data/train.json --dev data/dev.json"""
from dataclasses import dataclass, field

import evaluate
import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

LABELS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]


@dataclass
class DataArgs:
    train: str = field(default="data/train.json")
    dev: str = field(default="data/dev.json")
    model: str = field(default="bert-base-cased")


def make_align(tok):
    def align(rows):
        enc = tok(rows["tokens"], truncation=True, is_split_into_words=True)
        enc["labels"] = []
        for i, tags in enumerate(rows["tags"]):
            prev, out = None, []
            for w in enc.word_ids(i):
                out.append(-100 if w is None or w == prev else tags[w])
                prev = w
            enc["labels"].append(out)
        return enc

    return align


seqeval = evaluate.load("seqeval")


def compute_metrics(p):
    preds = np.argmax(p.predictions, axis=2)
    pred = [[LABELS[a] for a, b in zip(r, l) if b != -100] for r, l in zip(preds, p.label_ids)]
    gold = [[LABELS[b] for b in l if b != -100] for l in p.label_ids]
    res = seqeval.compute(predictions=pred, references=gold)
    return {"f1": res["overall_f1"], "precision": res["overall_precision"], "recall": res["overall_recall"]}


def main():
    dargs, targs = HfArgumentParser((DataArgs, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(targs.seed)
    tok = AutoTokenizer.from_pretrained(dargs.model, add_prefix_space=True)
    raw = load_dataset("json", data_files={"train": dargs.train, "dev": dargs.dev})
    with targs.main_process_first(desc="align labels"):
        data = raw.map(make_align(tok), batched=True, remove_columns=raw["train"].column_names)
    model = AutoModelForTokenClassification.from_pretrained(dargs.model, num_labels=len(LABELS))
    trainer = Trainer(
        model=model,
        args=targs,
        train_dataset=data["train"],
        eval_dataset=data["dev"],
        data_collator=DataCollatorForTokenClassification(tok),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        metrics = trainer.evaluate()
        print({k: round(v, 4) for k, v in metrics.items()})
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
