"""How large and how dense the code is, by part: `make size`.

Tokens are what a reader reads (names, operators, numbers, strings), so neither long lines nor short
ones change them. Nothing here is a limit.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "drumline"
LINTER = ROOT / "packages" / "drumline-lint" / "drumline_lint"
COUNTED_TOKENS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
VAGUE_NAMES = {
    "one", "found", "given", "own", "mine", "other", "others", "kept", "known", "seen", "got", "both",
    "such", "same", "another", "those", "these", "theirs", "ours", "thing", "things", "stuff",
    "wanted", "asked", "told", "said", "gone", "at", "more",
}  # fmt: skip
PRIVATE_OF_TORCH = re.compile(r"\btorch(?:\.\w+)*\._[a-z]\w*|from torch\S* import (?:\w+, )*_\w+")
COLUMNS = ("files", "lines", "tokens", "a line", "packed", "vague")


@dataclass
class Size:
    num_files: int = 0
    num_lines: int = 0
    num_tokens: int = 0
    num_packed: int = 0
    names: Counter[str] = field(default_factory=Counter)

    def add(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self.num_files += 1
        self.num_lines += text.count("\n")
        self.num_tokens += sum(token.type in COUNTED_TOKENS for token in tokens)
        self.num_packed += sum(is_packed(node) for node in ast.walk(tree))
        self.names.update(assigned_names(tree))

    def row(self) -> tuple[str, ...]:
        num_vague = sum(self.names[name] for name in self.names if name.strip("_") in VAGUE_NAMES)
        return (
            str(self.num_files),
            f"{self.num_lines:,}",
            f"{self.num_tokens:,}",
            f"{self.num_tokens / max(1, self.num_lines):.1f}",
            str(self.num_packed),
            f"{100 * num_vague / max(1, self.names.total()):.1f}%",
        )


def is_packed(node: ast.AST) -> bool:
    """Whether it is `a, b = x, y`, and swaps nothing."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    targets = {ast.unparse(element) for element in target.elts}
    return targets.isdisjoint(ast.unparse(element) for element in node.value.elts)


def assigned_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.For | ast.comprehension | ast.NamedExpr):
            targets = [node.target]
        for target in targets:
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def size_of(folder: Path) -> Size:
    size = Size()
    for path in sorted(folder.rglob("*.py")):
        if "corpus" not in path.parts:
            size.add(path)
    return size


def importers_by_module() -> dict[Path, set[Path]]:
    """For each module of the package the modules that import it."""
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in imported_names(node):
                module = ROOT.joinpath(*name.split(".")).with_suffix(".py")
                if module.is_file():
                    importers[module].add(path)
    return importers


def imported_names(node: ast.AST) -> Iterator[str]:
    """What a statement imports, which may be modules or names in one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_with_one_importer() -> list[Path]:
    """Modules that one module of their own folder imports, and no other."""
    return sorted(
        module
        for module, importers in importers_by_module().items()
        if len(importers) == 1 and module.parent == next(iter(importers)).parent
    )


def files_with_private_names_of_torch() -> list[Path]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [path for path in paths if PRIVATE_OF_TORCH.search(path.read_text(encoding="utf-8"))]


def main() -> None:
    parts = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    folders = {f"drumline/{part.name}": part for part in parts}
    folders |= {"drumline": PACKAGE, "lint": LINTER, "tests": ROOT / "tests"}
    print(f"{'':22}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name, folder in folders.items():
        print(f"{name:22}" + "".join(f"{cell:>10}" for cell in size_of(folder).row()))
    modules = modules_with_one_importer()
    print(f"modules with one importer, in their own folder: {len(modules)}")
    for module in modules:
        print(f"  {module.relative_to(PACKAGE)}")
    print(f"files with private names of torch: {len(files_with_private_names_of_torch())}")


if __name__ == "__main__":
    main()
