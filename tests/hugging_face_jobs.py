"""Jobs on the examples that use Hugging Face's libraries, in a process that has these loaded: to
import them takes longer than all that is done here. In the folder of the data:

    python -m tests.hugging_face_jobs make      writes tiny models and their data
    python -m tests.hugging_face_jobs check     looks at what the examples' own commands have trained, and trains more
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import json
import multiprocessing
import random
import re
import runpy
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torchmetrics import classification  # noqa: F401
from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2

import drumline
from drumline.base.user_code import load_class
from drumline.cli import main
from drumline.config.schema import CheckpointConfig, Config, DataConfig, OptimConfig
from drumline.data.dataset import BatchMaker, BatchRequest, makes_batches
from drumline.runs.events import read_events
from drumline.training.job.initial_weights import fit_weights, read_weights
from drumline.training.job.job import build_job, make_manager
from drumline.training.steps.eager import TrainStep
from drumline.training.tasks.built_in import load_task
from tests.jobs import assert_same_bits, make_config, newest, train_each_here, train_here
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
LM = f"{ROOT}/examples/finetune_lm.py:FineTune"
CLASSIFIER = f"{ROOT}/examples/finetune_classifier.py:Classifier"
LORA = f"{ROOT}/examples/lora.py:Lora"
TABLE, ROWS = (f"{ROOT}/examples/hf_dataset.py:{name}" for name in ("Table", "Rows"))
NUMBERS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]
JUDGEMENTS = {"lovely": "good", "great": "good", "awful": "bad", "boring": "bad"}
OTHER_WORDS = ["the", "film", "and", "its", "music", "were", "this", "time", "really"]
# Such a step takes away the gradient itself.
PLAIN_SGD = OptimConfig(lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, schedule="constant")
# of transformers' own: hundreds of patterns, which every process would compile again
with suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("gpt2")
FORK = multiprocessing.get_context("fork")  # of this process, with what it has loaded


def make() -> None:
    """Everything that the commands name, in the current folder."""
    torch.manual_seed(0)
    draw = random.Random(0)
    sizes = {
        "vocab_size": save_tokenizer(NUMBERS, Path("base")),
        "n_positions": 32,
        "n_embd": 64,
        "n_layer": 1,
    }
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    base = transformers.GPT2Config(**sizes, n_head=2, **no_dropout, bos_token_id=2, eos_token_id=2)
    modeling_gpt2.GPT2LMHeadModel(base).save_pretrained("base")
    sizes = {
        "vocab_size": save_tokenizer([*JUDGEMENTS, *OTHER_WORDS], Path("encoder"), first="[CLS]")
    }
    sizes |= {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = transformers.BertConfig(**sizes, **no_dropout, max_position_embeddings=32)
    modeling_bert.BertModel(encoder).save_pretrained("encoder")
    for split, count in (("train", 160), ("eval", 40)):
        write_lines(Path("answers", f"{split}.jsonl"), [count_on(draw) for _ in range(count)])
        write_lines(Path("reviews", f"{split}.jsonl"), [review(draw) for _ in range(count)])
    make_table("table", {"train": 1000, "eval": 500})
    make_table("short", {"train": 120, "eval": 20})


def make_table(folder: str, counts: dict[str, int]) -> None:
    spirals = runpy.run_path(f"{ROOT}/examples/spirals.py")["spirals"]
    points = {split: spirals(count, seed=count).tensors for split, count in counts.items()}
    rows = {
        split: {"point": one.numpy(), "arm": arm.numpy()} for split, (one, arm) in points.items()
    }
    tables = {split: datasets.Dataset.from_dict(columns) for split, columns in rows.items()}
    datasets.DatasetDict(tables).save_to_disk(folder)


def save_tokenizer(words: list[str], folder: Path, *, first: str = "") -> int:
    """One token a word; the size of the vocabulary."""
    numbers = {
        word: number for number, word in enumerate(["[PAD]", "[UNK]", "[EOS]", "[CLS]", *words])
    }
    tokenizer = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    if first:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, numbers[first])]
        )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        folder
    )
    return len(numbers)


def count_on(draw: random.Random) -> dict[str, str]:
    """Some numbers, and those that follow, up to the last."""
    words = NUMBERS[draw.randrange(9) :]
    given = draw.randint(1, 3)
    return {"prompt": " ".join(words[:given]), "answer": " ".join(words[given:])}


def review(draw: random.Random) -> dict[str, str]:
    """A text of 1 to 10 words, of which one decides."""
    judgement = draw.choice(list(JUDGEMENTS))
    words = draw.choices(OTHER_WORDS, k=draw.randrange(10))
    words.insert(draw.randint(0, len(words)), judgement)
    return {"text": " ".join(words), "label": JUDGEMENTS[judgement]}


def write_lines(file: Path, lines: list[dict[str, str]]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def check() -> None:
    """On ranks that are forked from here first: a process that has trained must not be forked."""
    for spec, data, base in ((LM, "answers", "base"), (CLASSIFIER, "reviews", "encoder")):
        gradients_do_not_depend_on_the_number_of_ranks(
            spec, job_config(data, {"base": base}, optim=PLAIN_SGD)
        )
    resumed_runs_have_the_same_bits()
    a_dataset_is_read_by_index_as_it_is()
    only_adapters_are_trained()
    weights_go_in_and_out()
    adapters_are_saved_as_the_docs_say()
    labels_are_predicted()


def job_config(
    data: str, settings: dict[str, Any], *, batch_size: int = 10, **others: Any
) -> Config:
    return replace(
        make_config(batch_size=batch_size, **others), data=DataConfig(dir=data), task=settings
    )


def gradients_do_not_depend_on_the_number_of_ranks(spec: str, config: Config) -> None:
    [(alone, by_hand, _)] = run_ranks(1, gradient, spec, config, context=FORK)
    assert np.abs(by_hand).max() > 1e-3
    # transformers' own loss is in single precision
    np.testing.assert_allclose(alone, by_hand, rtol=1e-4, atol=1e-6)
    results = run_ranks(2, gradient, spec, config, context=FORK)
    for found, _, _ in results:
        np.testing.assert_allclose(found, alone, rtol=1e-9, atol=1e-12)
    assert results[0][2] != results[1][2], "the ranks were to have batches of different lengths"


def gradient(spec: str, config: Config) -> tuple[Any, Any, list[int]]:
    """Of the first global batch, in double precision; of the loss that transformers itself computes
    of this rank's part, a mean over its tokens or texts; and the shape of that part."""
    task = load_task(spec)(config)
    model_of = task.model
    task.model = lambda: model_of().double()  # type: ignore[method-assign]
    with make_manager(config) as ddp:
        job = build_job(config, task, ddp)
        inputs, labels = job.loader.preview()
        trained = list(job.model.parameters())
        by_hand = torch.autograd.grad(job.model(**inputs, labels=labels).loss, trained)
        before = [parameter.detach().clone() for parameter in trained]
        TrainStep(job)(next(job.loader.steps()))
        changes = [old - now.detach() for old, now in zip(before, trained, strict=True)]
        job.close()
    flat, own = (torch.cat([one.flatten() for one in each]).numpy() for each in (changes, by_hand))
    return flat, own, list(inputs["input_ids"].shape)


def resumed_runs_have_the_same_bits() -> None:
    """Dropout in the adapters; rows by index; a stream that begins its second round in step 4, the
    step that is resumed from."""
    every_four = CheckpointConfig(every_steps=4)
    adapters = job_config(
        "answers", {"base": "base", "adapter_dropout": 0.2}, steps=6, checkpoint=every_four
    )
    rows = job_config("short", {"streaming": True}, steps=6, checkpoint=every_four, batch_size=36)
    jobs = [(adapters, load_task(LORA), Path("lora")), (rows, load_task(TABLE), Path("rows"))]
    jobs.append((*rows_by_index(), Path("indexed")))
    run_ranks(2, train_each_here, jobs, context=FORK)
    resumed = [(config, task, Path("resumed", run)) for config, task, run in jobs]
    for _, _, run in jobs:
        shutil.copytree(run, Path("resumed", run))
        shutil.rmtree(Path("resumed", run, "checkpoints", "step-00000006"))
    run_ranks(2, train_each_here, resumed, context=FORK)
    for _, _, run in jobs:
        events = read_events(Path("resumed", run, "events", "rank-00000.jsonl"))
        assert [event["step"] for event in events if event["kind"] == "resume"] == [4]
        snapshots = newest(Path("resumed", run)), newest(run)
        # In its state `datasets` also has what it read last, which is not the same after a resume.
        for snapshot in snapshots:
            snapshot.documents.pop("data", None)
        assert_same_bits(*snapshots)


def rows_by_index() -> tuple[Config, type[drumline.Task]]:
    """A job on the dataset itself, which is asked for one row after another."""

    class AsItIs(load_task(TABLE)):  # type: ignore[misc]
        def train_data(self) -> Any:
            return datasets.load_from_disk(self.config.data.dir)["train"].with_format("torch")

    every_four = CheckpointConfig(every_steps=4)
    return job_config(
        "short", {"streaming": False}, steps=6, checkpoint=every_four, batch_size=36
    ), AsItIs


def a_dataset_is_read_by_index_as_it_is() -> None:
    rows = datasets.load_from_disk("table")["eval"].with_format("torch")
    assert not makes_batches(rows)
    request = BatchRequest(0, 5, 9, shuffled=True)
    found, expected = (
        BatchMaker(source, seed=3)[request] for source in (rows, load_class(ROWS)(rows))
    )
    assert found.keys() == expected.keys() == {"point", "arm"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    train_here(*rows_by_index(), Path("alone"))
    alone, on_two_ranks = (newest(run).tensors["model"] for run in (Path("alone"), Path("indexed")))
    torch.testing.assert_close(on_two_ranks, alone)


def only_adapters_are_trained() -> None:
    weights = newest(Path("lora")).tensors["model"]
    _, base = read_weights(Path("base"))
    frozen = {name: tensor for name, tensor in weights.items() if "lora_" not in name}
    assert len(frozen) == len(base)
    for name, tensor in frozen.items():
        assert torch.equal(
            tensor, base[name.removeprefix("base_model.model.").replace(".base_layer.", ".")]
        ), name
    adapters = [tensor for name, tensor in weights.items() if "lora_B" in name]
    assert adapters
    assert all(adapter.abs().max() > 0 for adapter in adapters)  # they begin with zeros


def weights_go_in_and_out() -> None:
    for folder, model in (
        ("base", transformers.AutoModelForCausalLM),
        ("encoder", transformers.AutoModel),
    ):
        new = model.from_config(transformers.AutoConfig.from_pretrained(folder))
        # for --model.init FOLDER
        assert fit_weights(read_weights(Path(folder))[1], new)[1] == []
    assert main(["export", "runs/FineTune", "--to", "tuned/model.safetensors"]) == 0
    shutil.copy("base/config.json", "tuned/config.json")
    tuned = transformers.AutoModelForCausalLM.from_pretrained("tuned").state_dict()
    trained = drumline.load("runs/FineTune").state_dict()
    assert tuned.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in tuned.items())
    assert not torch.equal(
        tuned["lm_head.weight"], read_weights(Path("base"))[1]["transformer.wte.weight"]
    )


def adapters_are_saved_as_the_docs_say() -> None:
    tokens = {"input_ids": torch.tensor([[4, 5, 6]])}
    scores = drumline.load("runs/Lora")(**tokens).logits
    block = re.search(
        r"```python no-run\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(), re.DOTALL
    )
    assert block is not None
    exec(block[1], {})
    assert "model.safetensors" not in {file.name for file in Path("adapters").iterdir()}
    base = transformers.AutoModelForCausalLM.from_pretrained("base")
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged")
    assert not torch.allclose(base(**tokens).logits, scores, atol=1e-2)
    for model in (peft.PeftModel.from_pretrained(base, "adapters"), merged):
        torch.testing.assert_close(model.eval()(**tokens).logits, scores)


def labels_are_predicted() -> None:
    assert main(["predict", "runs/Classifier", "--to", "labels.jsonl"]) == 0
    predicted = [json.loads(line) for line in Path("labels.jsonl").read_text().splitlines()]
    expected = [
        json.loads(line)["label"] for line in Path("reviews", "eval.jsonl").read_text().splitlines()
    ]
    assert sum(map(str.__eq__, predicted, expected)) > 0.9 * len(expected)


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]]()
