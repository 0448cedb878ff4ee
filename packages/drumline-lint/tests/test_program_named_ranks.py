"""The name of an attribute is not believed where it is not told what is put there."""

from __future__ import annotations

import pytest

from drumline_lint.program.value import Rank
from test_program_values import asked, program_of

CONFIG = "from easydict import EasyDict\ncfg = EasyDict()\n"
SET = "import os, torch\nfrom config import cfg\ncfg.local_rank = "


@pytest.mark.parametrize(
    ("others", "kind"),
    [
        ([], "local"),
        ([SET + "0"], "local"),
        ([SET + "int(cfg.local_rank)"], "local"),
        ([SET + "int(os.environ['LOCAL_RANK'])"], "local"),
        (["other.local_rank = choose()()"], "local"),
    ],
)
def test_what_is_put_there_elsewhere(others: list[str], kind: str) -> None:
    files = {"main": "from config import cfg\nask(cfg.local_rank)\n", "config": CONFIG}
    files |= {f"other{number}": text for number, text in enumerate(others)}
    assert asked(program_of(files)) == {Rank(kind)}


@pytest.mark.parametrize(
    ("others", "kind"), [([], "local"), (["args.local_rank = choose()()"], "local")]
)
def test_arguments_of_the_command_line_are_those_of_their_script(
    others: list[str], kind: str
) -> None:
    text = "import argparse\nargs = argparse.ArgumentParser().parse_args()\nask(args.local_rank)\n"
    files = {"main": text} | {f"other{number}": text for number, text in enumerate(others)}
    assert asked(program_of(files)) == {Rank(kind)}
