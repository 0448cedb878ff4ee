"""What the rules about a training step say, with the names that the code uses."""

from __future__ import annotations

import pytest

from drumline_lint.rules import all_rules
from reading_cases import findings_in

MESSAGES = {
    "DL012": "model(x).sum().backward() averages gradients over all ranks at every micro-batch, optimizer.step() "
    "comes only after several",
    "DL022": "loss.item() waits at every step until the GPU has computed loss",
    "DL042": "datasets.CIFAR10 downloads on every rank: all ranks write the same files at the same time",
    "DL028": "torch.nn.utils.clip_grad_norm_ clips gradients that scaler has scaled and not yet unscaled",
    "DL033": "accelerator.gather keeps the samples that the last batch repeats",
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
        findings = findings_in((("a.py", code),))
        (message,) = [finding.message for finding in findings if finding.rule == "DL022"]
        assert message == f"{MESSAGES['DL022']}, and {more}"
