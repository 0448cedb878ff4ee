"""What the rules about a training step say, with the names that the code uses."""

from __future__ import annotations

import pytest

from drumline_lint.rules import all_rules
from reading_cases import findings_in

MESSAGES = {
    "DL012": "model(x).sum().backward() averages gradients over all ranks at every micro-batch, optimizer.step() "
    "comes only after several",
    "DL013": "DDP searches the graph for unused parameters at every step",
    "DL022": "loss.item() waits at every step until the GPU has computed loss",
    "DL041": "dist.barrier() makes all ranks wait for the slowest at every step",
    "DL042": "datasets.CIFAR10 downloads on every rank: all ranks write the same files at the same time",
    "DL028": "torch.nn.utils.clip_grad_norm_ clips gradients that scaler has scaled and not yet unscaled",
    "DL029": "what is saved has the optimizer's state, and not that of scaler",
    "DL033": "DistributedSampler repeats samples to give every rank as many, and the evaluation over them counts those "
    "twice",
}


@pytest.mark.parametrize("number", MESSAGES)
def test_the_message_of_the_bad_snippet(number: str) -> None:
    text = all_rules()[number].RULE.bad
    assert [one.message for one in findings_in((("a.py", text),)) if one.rule == number] == [
        MESSAGES[number]
    ]


def test_the_scaler_is_named_in_the_fix() -> None:
    text = all_rules()["DL028"].RULE.bad.replace("scaler", "amp_scaler")
    (found,) = [one.fix for one in findings_in((("a.py", text),)) if one.rule == "DL028"]
    assert found == "call amp_scaler.unscale_(optimizer) before it"


def test_other_statements_of_the_loop_are_counted() -> None:
    text = all_rules()["DL022"].RULE.bad
    for count, more in (
        (1, "so does another statement of this loop"),
        (2, "so do 2 other statements of this loop"),
    ):
        code = text + "    print(loss)\n" * count
        (found,) = [one.message for one in findings_in((("a.py", code),)) if one.rule == "DL022"]
        assert found == f"{MESSAGES['DL022']}, and {more}"
