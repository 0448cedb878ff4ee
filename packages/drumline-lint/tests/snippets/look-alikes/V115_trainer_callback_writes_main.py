import sys

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

MODEL = "xlm-roberta-large"


class EpochReport(TrainerCallback):
    def __init__(self):
        self.rows = []

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero:
            self.rows.append((state.epoch, metrics["eval_accuracy"]))
            with open(f"{args.output_dir}/report.csv", "w") as fh:
                fh.writelines(f"{e},{a}\n" for e, a in self.rows)


def accuracy(pred):
    guess = pred.predictions.argmax(-1)
    keep = pred.label_ids != -100
    return {"accuracy": float(np.mean(guess[keep] == pred.label_ids[keep]))}


def main():
    parser = HfArgumentParser(TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(sys.argv[1:])
    tok = AutoTokenizer.from_pretrained(MODEL)

    def encode(ex):
        out = tok(ex["tokens"], truncation=True, is_split_into_words=True)
        out["labels"] = [
            [-100 if w is None else tags[w] for w in out.word_ids(i)]
            for i, tags in enumerate(ex["ner_tags"])
        ]
        return out

    with args.main_process_first(desc="tokenize"):
        ds = load_dataset("conll2003").map(encode, batched=True)
    trainer = Trainer(
        model=AutoModelForTokenClassification.from_pretrained(MODEL, num_labels=9),
        args=args,
        train_dataset=ds["train"], eval_dataset=ds["validation"],
        data_collator=DataCollatorForTokenClassification(tok),
        compute_metrics=accuracy, callbacks=[EpochReport()],
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print({k: round(v, 4) for k, v in metrics.items()})


if __name__ == "__main__":
    main()
