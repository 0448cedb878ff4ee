"""Which differences between the ranks of a script are reported, and which are not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

from drumline.base.untrusted import from_json
from drumline.parallel.scripts.script_recorder import arguments_by_name, script_facts
from drumline.watch.cluster_state import LoaderReport, ModuleHashes, ModuleReport, ScriptReport
from drumline.watch.script_differences import ScriptComparison, is_own_value

HOSTS = ("a", "a", "b", "b")


def report(rank: int, **content: Any) -> ScriptReport:
    return ScriptReport(host=HOSTS[rank], **content)


def sentences(reports: list[ScriptReport], comparison: ScriptComparison | None = None) -> list[str]:
    """As of reports that have gone over the wire."""
    sent = {
        rank: from_json(ScriptReport, json.loads(json.dumps(asdict(rank_report))))
        for rank, rank_report in enumerate(reports)
    }
    return [
        difference.message
        for difference in (comparison or ScriptComparison(len(reports))).update(sent)
    ]


def hashes(value: int, **settings: Any) -> ModuleHashes:
    return ModuleHashes(
        tensors={"w": ("float32 [2]", 7), "b": ("float32 [1]", value)}, settings=settings
    )


def module(
    steps: Mapping[int, ModuleHashes], ranks: tuple[int, ...] = (0, 1)
) -> dict[str, ModuleReport]:
    return {"0": ModuleReport(name="Net", ranks=ranks, hashes=steps)}


def test_words_have_names() -> None:
    words = ["--lr", "0.1", "--shift", "-0.5", "--amp", "--seed=3", "data", "model.depth=4", "-v"]
    assert arguments_by_name(words) == {
        "--lr": "0.1",
        "--shift": "-0.5",
        "--amp": "given",
        "--seed": "3",
        "argument 1": "data",
        "model.depth": "4",
        "-v": "given",
    }


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("--node-rank", "0 0 1 1"),
        ("--machine", "0 0 1 1"),
        ("--gpu", "0 1 0 1"),
        ("--worker", "1 2 3 4"),
        ("--seed", "17 17 99 99"),
        ("--node", "a a b b"),
        ("--bind", "10.0.0.1:80 10.0.0.1:80 10.0.0.2:80 10.0.0.2:80"),
        ("--dump", "/runs/a/x /runs/a/x /runs/b/x /runs/b/x"),
        ("--data", "/disk/imagenet /disk/imagenet /mnt/imagenet /mnt/imagenet"),
        ("--log-dir", "here here there there"),
        ("--output_dir", "x1 x1 x7 x7"),
        ("trainer.logs", "here here there there"),
        ("--master-addr", "one one two two"),
        ("--job-id", "17 17 18 18"),
        ("--data-shard", "0 0 1 1"),
    ],
)
def test_who_a_rank_is_is_no_difference(name: str, values: str) -> None:
    assert is_own_value(name, values.split(), HOSTS)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("--lr", "0.1 0.1 0.2 0.2"),
        ("--lr", "1e-0 1e-0 1e-1 1e-1"),
        ("--epochs", "10 10 20 20"),
        ("--data", "/disk/v1 /disk/v1 /disk/v2 /disk/v2x"),
        ("--amp", "given given None None"),
        ("--backend", "gloo gloo gloo nccl"),
        ("--blog", "x x y y"),
        # By chance the number of a node, or one more.
        ("--epochs", "1 1 2 2"),
        ("--accum", "0 0 1 1"),
        ("--gpus-per-node", "1 1 2 2"),
        ("--dims", "1,64 1,64 2,64 2,64"),
        # Only a part of the name says log, out, rank or id.
        ("--out-channels", "64 64 128 128"),
        ("--logit-scale", "1.5 1.5 2.5 2.5"),
        ("--log_every", "10 10 20 20"),
        ("--cache-size", "64 64 128 128"),
        ("--lora-rank", "8 8 16 16"),
        ("--model-id", "gpt2 gpt2 bert bert"),
    ],
)
def test_what_changes_the_training_is_a_difference(name: str, values: str) -> None:
    assert not is_own_value(name, values.split(), HOSTS)


def test_facts_are_one_warning() -> None:
    def facts(rank: int) -> dict[str, dict[str, Any]]:
        return {
            "arguments": {"--lr": "0.1" if rank else "0.2", "--node-rank": str(rank // 2)},
            "variables": {"NCCL_ALGO": "Ring" if rank > 1 else "not set"},
            "packages": {"torch": "2.13.0", **({"tensorboard": "2"} if rank == 0 else {})},
            "script": {"train.py": "12" if rank < 3 else "34"},
        }  # fmt: skip

    comparison = ScriptComparison(4)
    assert sentences([report(rank) for rank in range(4)], comparison) == [], (
        "nobody has a group yet"
    )
    everyone = [report(rank, facts=facts(rank)) for rank in range(4)]
    assert sentences(everyone[:3], comparison) == [], "one is missing"
    assert sentences(everyone, comparison) == [
        "warning: ranks differ in 3 things:\n"
        "  - the variable NCCL_ALGO: ranks 0, 1 (a): not set; ranks 2, 3 (b): Ring\n"
        "  - the argument --lr: ranks 1-3 (a and b): 0.1; rank 0 (a): 0.2\n"
        "  - the code of train.py: ranks 0-2 (a and b): 12; rank 3 (b): 34. "
        "Try: set the same environment variables on every node before the ranks start; "
        "start the script with the same arguments on every node; "
        "use the same code on every node: the same commit, without local changes"
    ]
    assert sentences(everyone, comparison) == [], "once"


@pytest.mark.parametrize(
    "name", ["--api-key", "--wandb_token", "--password", "--aws-secret-access-key"]
)
def test_a_secret_is_compared_and_never_shown(name: str) -> None:
    reports = []
    for rank, value in enumerate(["hunter2", "hunter2", "hunter3", "hunter2"]):
        reports.append(
            report(
                rank, facts={"arguments": script_facts({name: value, "--lr": "0.1"})["arguments"]}
            )
        )
    assert "hunter" not in json.dumps([asdict(rank_report) for rank_report in reports])
    assert sentences(reports) == [
        f"warning: ranks differ in the argument {name}: ranks 0, 1, 3 (a and b): hidden value 1; "
        "rank 2 (b): hidden value 2. Try: start the script with the same arguments on every node"
    ]


@pytest.mark.parametrize("name", ["--lr", "--max-tokens", "--tokenizer", "--keyboard"])
def test_what_is_no_secret_is_shown(name: str) -> None:
    assert script_facts({name: "1"})["arguments"] == {name: "1"}


@pytest.mark.parametrize(
    ("loaders", "what"),
    [
        ([(50, 800), (50, 800)], None),
        ([(50, 800), (25, 400)], "the length of the dataset"),
        ([(50, 800), (50, 799)], "the length of the dataset"),
        ([(None, 800), (None, 400)], "the length of the dataset"),
        ([(50, None), (40, None)], "the number of batches"),
        ([(50, None), (49, None)], None),
        ([(50, None), (None, None)], None),
        ([(50, 800), None], None),
    ],
)
def test_loaders(loaders: list[tuple[int | None, int | None] | None], what: str | None) -> None:
    reports = [
        report(
            rank,
            loaders={"train.py:42": LoaderReport(batches=content[0], samples=content[1])}
            if content
            else {},
        )
        for rank, content in enumerate(loaders)
    ]
    messages = sentences(reports)
    assert len(messages) == (what is not None)
    if what:
        assert messages[0].startswith(
            f"warning: ranks differ in {what} of the DataLoader at train.py:42: rank 0 (a): "
        )
        assert " Try: give every rank the same dataset" in messages[0]


def test_replicas_that_drift_are_named_with_the_setting_that_differs() -> None:
    comparison = ScriptComparison(2)

    def look(*steps: dict[int, ModuleHashes]) -> list[str]:
        return sentences(
            [report(rank, modules=module(content)) for rank, content in enumerate(steps)],
            comparison,
        )

    assert look({0: hashes(1)}, {0: hashes(1)}) == []
    assert look({0: hashes(1), 1: hashes(2)}, {0: hashes(1)}) == [], "rank 1 is not there yet"
    drifted = {1: hashes(3, lr=0.2), 10: hashes(4)}
    assert look({1: hashes(2, lr=0.1)}, drifted) == [
        "warning: DDP module Net: the replicas differ at step 1: rank 0 (a) and rank 1 (a) differ in b, and no "
        "majority shows which is right; all agreed at step 0; their optimizers differ in lr: rank 0 (a): 0.1; "
        "rank 1 (a): 0.2. Try: look for what differs across ranks: learning rate, seed, clipping, code under "
        "`if rank`; stop the job: its replicas are no longer one model"
    ]
    assert look({10: hashes(5)}, drifted) == [], "once"


def test_a_module_of_some_ranks_is_compared_among_them() -> None:
    reports = [report(0), report(1)] + [
        report(rank, modules=module({1: hashes(rank)}, (2, 3))) for rank in (2, 3)
    ]
    [message] = sentences(reports)
    assert "rank 2 (b) and rank 3 (b) differ in b" in message
