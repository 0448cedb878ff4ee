"""What the rules about a training step say, with the names that the code uses."""

from __future__ import annotations

import pytest

from drumline_lint.rules import all_rules
from reading_cases import findings_in

MESSAGES = {
    "DL012": "model(x).sum().backward() averages gradients over all ranks at every micro-batch, optimizer.step() "
    "comes only after several",
    "DL042": "datasets.CIFAR10 downloads on every rank: all ranks write the same files at the same time",
    "DL028": "torch.nn.utils.clip_grad_norm_ clips gradients that scaler has scaled and not yet unscaled",
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
