"""One module for each mistake: `RULE` describes it; `check` finds it in Python, `check_shell` in
scripts.

def check(program: Program, source: Source) -> Iterator[Finding]
def check_shell(script: Script) -> Iterator[Finding]

Each module in this folder whose name begins with `dl` is a rule.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType


@cache
def all_rules() -> dict[str, ModuleType]:
    """The module of each rule by its number, in order."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(__path__) if module.name.startswith("dl")
    )
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {module.RULE.id: module for module in modules}
