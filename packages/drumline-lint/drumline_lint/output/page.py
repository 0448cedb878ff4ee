"""Makes docs/lint.md from the rules: python -m drumline_lint.output.page > docs/lint.md"""

from __future__ import annotations

from collections.abc import Sequence

from drumline_lint.findings import OWN_RULES, Rule
from drumline_lint.rules import all_rules
from drumline_lint.terminal import show

TOP = """\
# Lint

`drumline lint PATH...`, or `drumline-lint PATH...` where only the linter is installed, finds mistakes of distributed
training in code before a job is started: where each is, why it matters, and what to write instead. It reads Python,
notebooks, shell and sbatch scripts. It neither runs nor imports what it reads, and does not need torch. In code that is
not distributed it reports only what would be wrong there, too.

*Not run by the tests as Python: it would need a process group. The linter reads it below.*

```python no-run
# train.py
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = DDP(torch.nn.Linear(8, 2).cuda())
torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
```

```console
$ drumline lint train.py --select DL008,DL014; echo "exit code $?"
train.py:7:23: error DL008 device-by-global-rank: dist.get_rank() is the rank among all hosts, not a GPU of this one
    | torch.cuda.set_device(dist.get_rank())
    |                       ^~~~~~~~~~~~~~~
    fix: choose the device by LOCAL_RANK
train.py:9:1: error DL014 unguarded-save: every rank comes to torch.save and writes "model.pt"
    | torch.save(model.module.state_dict(), "model.pt")
...
2 errors in 1 of 1 file
exit code 1
```

## What is read

Folders are walked for `.py`, `.ipynb`, `.sh`, `.bash`, `.sbatch` and `.slurm`; hidden folders, virtual environments,
`__pycache__`, `node_modules`, `build` and `site-packages` are passed over, and what `--exclude` names. A file that is
given by name is always read: by its ending, else by its `#!` line, else as Python. `-` is the standard input, and
`--stdin-filename` says what to call it. Files that are given together are understood together: names are followed
through imports between them, so give the whole folder rather than one file.

Of a notebook the code cells are read, without magics and shell lines; a place is `cell 3:2:1`, the third of all cells,
its second line. What cannot be read is told as [DL000](#dl000-unreadable), and the rest goes on.

| level | means | shown |
| --- | --- | --- |
| error | the run breaks, hangs, or its result is wrong | yes |
| warning | it costs time, or bites under circumstances | yes |
| note | may well be as meant | with `--severity note`, or when selected by its own number or name |

| exit code | means |
| --- | --- |
| 0 | no error and no warning is shown; notes never fail; with `--exit-zero`, whatever was found |
| 1 | there are some |
| 2 | the command or the settings are wrong, or a file could not be read; `--exit-zero` does not change that |

## Formats

`--format` is `text`, `json`, `sarif` or `github`; `--output FILE` writes it there. `--statistics` counts by rule, as
text; JSON has the same numbers in `summary`.

```console
$ drumline lint train.py --select DL008 --format github | cut -c 1-109
::error file=train.py,line=7,col=23,endLine=7,endColumn=38,title=DL008 device-by-global-rank::dist.get_rank()
1 error in 1 of 1 file
```

JSON is one object. `findings` and `problems` (files that could not be read) are lists of objects with `rule`, `name`,
`severity`, `path`, `cell` (null outside notebooks), `line`, `column`, `end_line`, `end_column`, `message`, `fix` and
`edits`, which have `line`, `column`, `end_line`, `end_column` and `text`. All count from 1, columns in characters, and
an end column is behind the last character. `summary` has `shown` and `not_shown` by level, `by_rule`, `fixed` and
`fixable`; `files` is how many were read. `version` is 1, and counts up should any of this change.

## Mending

`--fix` applies what is mechanical, and `--diff` shows it; `--diff` alone writes nothing. Edits that touch each other
are made one after the other, and one that would leave a file that cannot be parsed is not made. Line ends, encoding and
mode are kept. Notebooks are not written, nor are files outside of the folders given that a link leads to.

## Silence

`# noqa: DL014` silences a rule, by number or by name, on any line of the statement; in a script, behind the last line
of the command. `# noqa` silences all rules there. For a project, in the nearest `pyproject.toml` above the first path
that has this table:

```toml
[tool.drumline.lint]
select = ["DL0", "fixed-port"]      # only these: numbers, their beginnings, or names
ignore = ["DL014"]                  # but not these
exclude = ["third_party", "old/*"]  # names, or paths below this file
severity = "note"                   # from which level on

[tool.drumline.lint.per-file-ignores]
"tests/*" = ["DL008"]
```

Flags win: `--select` sets `select` and `ignore` of the file aside, `--severity` its severity; `--ignore` and
`--exclude` leave out more. A rule's own number or name beats a beginning of numbers. `--no-config` does not look for
the file. A setting, a type or a rule that is not known is an error.

## Before a commit, and in CI

With [pre-commit](https://pre-commit.com): the recipe in
[drumline-lint's README](../packages/drumline-lint/README.md#with-pre-commit) installs the linter only, without torch.

In a GitHub workflow, with annotations in the pull request; OWNER stands for the account that Drumline is taken from:

```yaml
steps:
  - uses: actions/checkout@v4
  - run: pip install "drumline-lint @ git+https://github.com/OWNER/drumline#subdirectory=packages/drumline-lint"
  - run: drumline-lint . --format github
```

or with code scanning, the last step replaced by:

```yaml
  - run: drumline-lint . --format sarif --output lint.sarif --exit-zero
  - uses: github/codeql-action/upload-sarif@v3
    with:
      sarif_file: lint.sarif
```

## Rules

`drumline lint --list` prints this table, `drumline lint --explain DL014` one of the rules. DL0xx are about Python,
DL1xx about scripts. The last two are no rules but what kept a rule from being asked.
"""
BOTTOM = """\
---

This page is made from the rules: `python -m drumline_lint.output.page > docs/lint.md`.
"""
FENCES = {"python": "py", "shell": "sh"}


def page(rules: Sequence[Rule]) -> str:
    """The whole page."""
    listed = [*rules, *OWN_RULES.values()]
    table = ["| rule | name | level | found | mended by `--fix` |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([TOP, *table, *map(_row, listed), "", *map(_section, listed), BOTTOM])


def _row(rule: Rule) -> str:
    name = f"[{rule.id}](#{_anchor(rule)}) | {rule.name}"
    return f"| {name} | {rule.severity} | {_cell(rule.summary)} | {'yes' if rule.fixable else 'no'} |"


def _section(rule: Rule) -> str:
    mended = " `--fix` can do it." if rule.fixable else ""
    return (
        f"### {rule.id} {rule.name}\n\n"
        f"{rule.severity.capitalize()}: {rule.summary}.\n\n{rule.why}\n\nFix: {rule.fix}.{mended}\n{_snippets(rule)}"
    )


def _snippets(rule: Rule) -> str:
    if rule.id in OWN_RULES:
        return ""
    fence = FENCES[rule.language]
    return f"\nBad:\n\n```{fence}\n{rule.bad.strip()}\n```\n\nGood:\n\n```{fence}\n{rule.good.strip()}\n```\n"


def _anchor(rule: Rule) -> str:
    return f"{rule.id.lower()}-{rule.name}"


def _cell(text: str) -> str:
    """A pipe would end the cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    show(page([module.RULE for module in all_rules().values()]))
