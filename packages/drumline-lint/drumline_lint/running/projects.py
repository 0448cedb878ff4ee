"""Which of the given files belong together: those that import each other. Each such group is a program of its own.

Found by the words of their import statements, without a look at their trees: most files of a large folder have nothing
to do with most others, and many nothing with training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from drumline_lint.program.files import Files, package_of
from drumline_lint.reading.source import Source
from drumline_lint.running.distributed import speaks_of_ranks

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<package>[.\w]+)[ \t]+import[ \t]+(?P<parts>\([^)]*\)|[^\n#]+)"
    r"|import[ \t]+(?P<modules>[^\n#]+))",
    re.MULTILINE,
)
_NAME = re.compile(r"(?<!\bas )[.\w]+")


def projects(sources: Sequence[Source]) -> list[list[Source]]:
    """Groups of files, those of each in the order in which they were given."""
    everything = Files(sources)
    group = {source: {source} for source in sources}
    for source in sources:
        for other in _imported(everything, source):
            if group[other] is not group[source]:
                smaller, larger = sorted((group[source], group[other]), key=len)
                larger |= smaller
                group.update(dict.fromkeys(smaller, larger))
    number = {source: place for place, source in enumerate(sources)}
    found = {id(one): one for one in group.values()}
    return [sorted(one, key=number.__getitem__) for one in found.values()]


def may_be_distributed(project: Sequence[Source]) -> bool:
    """Whether any of its files speaks of what only ranks do."""
    return any(speaks_of_ranks(source) for source in project)


def _imported(everything: Files, source: Source) -> Iterator[Source]:
    for name in set(_names(source.text)):
        while name:
            other = everything.module(name, source)
            if other is not None:
                yield other
            name = package_of(name)


def _names(text: str) -> Iterator[str]:
    """Of all modules that may be imported: of `from a.b import c`, a.b and a.b.c."""
    for found in _IMPORT.finditer(text):
        if found["modules"]:
            yield from _NAME.findall(found["modules"])
            continue
        package = found["package"]
        joint = "" if package.endswith(".") else "."
        yield package
        yield from (f"{package}{joint}{name}" for name in _NAME.findall(found["parts"]))
