"""What the options of a program are where nobody gives them another value, and under a launch that
is shown: of argparse, of a class of settings, of a YAML file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from drumline_lint.flow.shown_runs import ShownRun, shown_runs
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import connected
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import called_name, dotted, last_name, owner_of, parent_of
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

UNKNOWN = object()
"""A value that may be anything."""
_HOLDER = re.compile(
    r"(^|[._])(args?|arguments|cfg|conf|config|configs|flags|hparams|hps|opts?|options|params|settings)(\.|$)",
    re.IGNORECASE,
)
_HOLDING_CLASS = re.compile(r"(Args|Arguments|Config|Configuration|Options|Params|Settings)$")
_OF_LAUNCHERS = ("local_rank", "rank", "world_size", "node_rank")
"""What a launcher gives, or its variables."""
_WORDS_OF_YAML = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_WORDS_OF_FLAGS = {"y": True, "t": True, "n": False, "f": False}
"""What a function of a parser may read as true or false: `type=str2bool`."""
_READS_BOOL = re.compile(
    r"_*(str(ing)?_?(2|to)_?bool(ean)?|(to|as|parse)_?bool(ean)?|boolean|bool(ean)?_(arg|flag|str|string|type))",
    re.IGNORECASE,
)
"""The names of such functions."""
_SETTING = re.compile(r"^[ \t]*['\"]?([\w-]+)['\"]?:[ \t]*([^#\n]*)", re.MULTILINE)
_NOTHING_IN_YAML = ("null", "none", "~")
_QUOTED_IN_YAML = re.compile(r"'[^']*'|\"[^\"\\]*\"")
_NOT_PLAIN_IN_YAML = re.compile(r"['\"\[{&*!|>]|.*(\$\{|\{\{)")
"""What is not one value, or is made of others: a list, an anchor, text of several lines, `${name}`."""
_LONGEST_VALUE = 1000
"""Of longer ones, nothing is known; `int` raises an error for numbers of more than 4,300 digits."""
_INTEGER = re.compile(r"[-+]?\d+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_NOT_KNOWN = re.compile(r"[$`]|<\w[^<>]*>|\{\{")
"""In a word of a script: a variable, a placeholder."""


def option_of(expression: ast.expr) -> str:
    """The option that an expression reads; empty if it reads none.

    `resume` of `args.resume`, `cfg["resume"]`, `cfg.get("resume")` and
    `getattr(args, "resume", None)`.
    """
    if isinstance(expression, ast.Attribute):
        return expression.attr if is_holder(expression.value) else ""

    holder, key = _holder_and_key(expression)
    if holder is None or not is_holder(holder):
        return ""

    return str(key.value) if isinstance(key, ast.Constant) else ""


def _holder_and_key(expression: ast.expr) -> tuple[ast.expr | None, ast.expr | None]:
    """`cfg` and `"resume"` of `cfg["resume"]`, `cfg.get("resume")` and `getattr(cfg, "resume")`."""
    if isinstance(expression, ast.Subscript):
        return expression.value, expression.slice
    if not isinstance(expression, ast.Call):
        return None, None

    arguments = expression.args
    if called_name(expression) == "get":
        return owner_of(expression), arguments[0] if len(arguments) == 1 else None
    if called_name(expression) in ("getattr", "hasattr") and len(arguments) > 1:
        return arguments[0], arguments[1]

    return None, None


def is_holder(expression: ast.expr) -> bool:
    """`args`, `self.cfg.train`: what has options as attributes."""
    return _HOLDER.search(dotted(expression)) is not None


@cached_query
def option_values(
    program: Program, source: Source, name: str, run: ShownRun | None
) -> Sequence[object]:
    """What an option may be before the code sets it; without a run, by its defaults.

    Nothing if nothing declares it. `[0.1]` for `lr` in a run of `train.py --lr 0.1`.
    """
    if name in _OF_LAUNCHERS:
        return [UNKNOWN]

    values = _values_of_run(program, source, name, run) if run is not None else []
    if values:
        return values

    values = _values_by_default(program, source, name, run)
    if not values:
        return []

    if not _shows_values(program, source, name) or _is_given(program, source, name, run):
        return [UNKNOWN]
    return values


def _shows_values(program: Program, source: Source, name: str) -> bool:
    """Whether the repository shows what its options are: by a launch of the program, a YAML file
    that has this one, or a command line in the code."""
    is_launched = any(map(program.starts_of, connected(program, source)))
    if is_launched or name in _settings(program):
        return True

    return _has_fixed_arguments(program, source)


def _values_by_default(
    program: Program, source: Source, name: str, run: ShownRun | None
) -> list[object]:
    """By the YAML files that a launch names; otherwise by the code and, where the launch names
    none, by all YAML files."""
    of_files: list[object] = []

    if run is not None and run.settings:
        named = [_settings_of(program, path).get(name, []) for path in run.settings]
        if any(named):
            return [value for values in named for value in values]
    else:
        of_files = _settings(program).get(name, [])

    of_code = [*_of_parsers(program, source, name), *_of_classes(program, source, name)]
    return [*of_code, *of_files]


# What a launch gives.


def _values_of_run(program: Program, source: Source, name: str, run: ShownRun) -> list[object]:
    """What the words of a run give an option; nothing if they do not have it."""
    declarations = _declarations(program, source, name)
    values: list[object] = []

    for call in declarations:
        words = (_flags_of(call) or {name}) & run.options.keys()
        values += [_converted(call, run.options[word]) for word in sorted(words)]

    if not declarations and name in run.options:
        written = run.options[name]
        return [True if written is None else _of_word(written)]

    is_negated = f"no_{name}" in run.options  # as `BooleanOptionalAction` allows
    return values or ([UNKNOWN] if is_negated else [])


def _flags_of(call: ast.Call) -> set[str]:
    """`g` and `gpus` of `add_argument("-g", "--gpus", dest="num_gpus")`."""
    words = [word for word in call.args if isinstance(word, ast.Constant)]
    return {_as_attribute(str(word.value)) for word in words}


def _as_attribute(flag: str) -> str:
    """`num_gpus` of `--num-gpus`."""
    return flag.lstrip("-").replace("-", "_")


def _of_word(written: str) -> object:
    """The value of a word of a command line, for an option that no parser declares."""
    return UNKNOWN if _NOT_KNOWN.search(written) else of_yaml(written)


def _converted(call: ast.Call, written: str | None) -> object:
    """The value that a word of a command line has in the program; None for a bare flag.

    `3` of `--epochs 3`, but `"3"` where `epochs` is declared without a type.
    """
    action = argument(call, None, "action")
    kind = getattr(action, "value", None)
    if kind in ("store_true", "store_false"):
        return kind == "store_true"

    is_stored = action is None or kind == "store"
    is_simple = (
        is_stored and not argument(call, None, "nargs") and not argument(call, None, "const")
    )
    if written is None or not is_simple or _NOT_KNOWN.search(written):
        return UNKNOWN
    return _typed(call, written)


def _typed(call: ast.Call, text: str) -> object:
    """What a parser makes of a word or of a default that is a text: 3 of `"3"` for `type=int`."""
    kind = argument(call, None, "type")
    name = last_name(kind) if kind is not None else "str"
    if name == "str":
        return text
    if name == "bool":
        return bool(text)  # also of "False"

    if _READS_BOOL.fullmatch(name):
        value = _WORDS_OF_FLAGS.get(text.lower(), of_yaml(text))
        return bool(value) if value in (True, False) else UNKNOWN

    if name not in ("int", "float"):
        return UNKNOWN
    try:
        return int(text) if name == "int" else float(text)
    except ValueError:
        return UNKNOWN


def _is_given(program: Program, source: Source, name: str, run: ShownRun | None) -> bool:
    """Whether the code, or a script whose launches are not read for this run, may give the option a
    value."""
    files = connected(program, source)
    if any(_is_default_set(program, file, name) for file in files):
        return True

    words = "[-_]".join(map(re.escape, name.split("_")))
    flag = rf"--(?:no[-_])?{words}(?![\w-])"
    if _is_flag_used(program, files, re.compile(flag)):
        return True

    setting = re.compile(rf"(?<![\w.-])({flag}|\+*([\w.]+\.)?{re.escape(name)}=)")
    return any(map(setting.search, _texts_of_scripts(program, source, run)))


def _is_flag_used(program: Program, files: Iterable[Source], flag: re.Pattern[str]) -> bool:
    """Whether files have a flag elsewhere than in its declaration and in errors: as in
    `subprocess.run(["python", "train.py", "--amp"])`."""
    num_written = 0
    num_told = 0
    for file in files:
        num_written += len(flag.findall(file.text))
        num_told += sum(len(flag.findall(text)) for text in _told_to_users(program, file))

    return num_written > num_told


@cached_query
def _texts_of_scripts(program: Program, source: Source, run: ShownRun | None) -> set[str]:
    """The scripts that may give more than the words of the run."""
    launches = [launch for starts in program.launches.values() for launch in starts]
    scripts = {launch.script.outermost for launch in launches}

    if run is not None:
        names = [file.path.name for file in connected(program, source)]
        read = {shown.launch.script.outermost for shown in shown_runs(program, source)}
        unread = scripts - read
        scripts = {script for script in unread if any(name in script.text for name in names)}
        if run.is_open:
            scripts.add(run.launch.script.outermost)

    return {script.text for script in scripts}


@cached_query
def _told_to_users(program: Program, source: Source) -> list[str]:
    """The texts of declarations and of errors, which may name options."""
    index = program.index(source)
    every = [*index.calls.get("add_argument", ()), *index.every(ast.Raise)]
    return [source.code(node) for node in every]


def _is_default_set(program: Program, source: Source, name: str) -> bool:
    """`parser.set_defaults(name=value)`"""
    defaults = program.index(source).calls.get("set_defaults", ())
    return any(argument(call, None, name) is not None for call in defaults)


def _has_fixed_arguments(program: Program, source: Source) -> bool:
    """`parser.parse_args("--epochs 3".split())`: the command line is written in the file."""
    for call in program.index(source).calls.get("parse_args", ()):
        for words in call.args:
            whole = owner_of(words) if isinstance(words, ast.Call) else words
            if isinstance(whole, (ast.List, ast.Constant)):
                return True

    return False


# Defaults in the code.


def _of_parsers(program: Program, source: Source, name: str) -> Iterator[object]:
    """What a parser has without the flag: 0.1 of `add_argument("--lr", default=0.1)`, and False of
    `add_argument("--amp", action="store_true")`."""
    for call in _declarations(program, source, name):
        action = argument(call, None, "action")
        kind = getattr(action, "value", None)
        default = argument(call, None, "default")

        if kind in ("store_true", "store_false") and default is None:
            yield kind == "store_false"
        elif argument(call, None, "required") is not None or argument(call, None, "nargs"):
            yield UNKNOWN
        else:
            value = _constant(program, default) if default is not None else None
            yield _typed(call, value) if isinstance(value, str) else value


def _declarations(program: Program, source: Source, name: str) -> list[ast.Call]:
    """`parser.add_argument("--name")`, in the files that are connected with this one."""
    return _declared_in(program, connected(program, source)).get(name, [])


@cached_query
def _declared_in(program: Program, component: frozenset[Source]) -> dict[str, list[ast.Call]]:
    """By the attribute that a parser gives the value."""
    declared: dict[str, list[ast.Call]] = {}

    for file in sorted(component, key=lambda file: file.path):
        for call in program.index(file).calls.get("add_argument", ()):
            declared.setdefault(_destination(call), []).append(call)

    return declared


def _destination(call: ast.Call) -> str:
    """The attribute that a parser gives the value: `num_gpus` of `add_argument("--num-gpus")`."""
    destination = argument(call, None, "dest")
    if isinstance(destination, ast.Constant):
        return str(destination.value)

    words = [str(word.value) for word in call.args if isinstance(word, ast.Constant)]
    long = [word for word in words if word.startswith("--")]
    return _as_attribute(long[0]) if long else ""


def _constant(program: Program, expression: ast.expr) -> object:
    """The only value that an expression has, if it is a constant."""
    values = program.values(expression)
    constants = [value.value for value in values if isinstance(value, ConstantValue)]
    return constants[0] if len(constants) == len(values) == 1 else UNKNOWN


def _of_classes(program: Program, source: Source, name: str) -> Iterator[object]:
    """`name: bool = False`, in a class of settings."""
    for file in connected(program, source):
        for default in _fields(program, file).get(name, ()):
            yield _constant(program, default)


@cached_query
def _fields(program: Program, source: Source) -> dict[str, list[ast.expr]]:
    """The defaults of the fields of classes such as `TrainingConfig`, by their names."""
    fields: dict[str, list[ast.expr]] = {}

    for statement in program.index(source).every(ast.AnnAssign):
        owner = parent_of(statement)
        if not isinstance(owner, ast.ClassDef) or not _HOLDING_CLASS.search(owner.name):
            continue
        if isinstance(statement.target, ast.Name) and statement.value is not None:
            fields.setdefault(statement.target.id, []).append(statement.value)

    return fields


# Defaults in YAML.


@cached_query
def _settings(program: Program) -> dict[str, list[object]]:
    """What all files of YAML set: `name: false`."""
    settings: dict[str, list[object]] = {}

    for path in program.documents:
        if path.suffix not in (".yaml", ".yml"):
            continue
        for name, values in _settings_of(program, path).items():
            settings.setdefault(name, []).extend(values)

    return settings


@cached_query
def _settings_of(program: Program, path: Path) -> dict[str, list[object]]:
    """What a file of YAML sets, in whatever section: `{"lr": [0.1]}` of a line `  lr: 0.1`."""
    settings: dict[str, list[object]] = {}
    for name, written in _SETTING.findall(program.documents[path]):
        settings.setdefault(name, []).append(of_yaml(written.strip()))

    return settings


def of_yaml(written: str) -> object:
    """The value of a word in YAML: `False` of `off`, `3` of `3`, None of `null`; of `"off"`, the text."""
    lowered = written.lower()
    if lowered in _NOTHING_IN_YAML:
        return None
    if not written or len(written) > _LONGEST_VALUE:  # empty: of the lines below it
        return UNKNOWN

    quoted = _QUOTED_IN_YAML.fullmatch(written)
    text = written[1:-1] if quoted else written
    if _NOT_PLAIN_IN_YAML.match(text):
        return UNKNOWN
    if quoted:
        return text

    if _INTEGER.fullmatch(written):
        return int(written)
    if _NUMBER.fullmatch(written):
        return float(written)

    return _WORDS_OF_YAML.get(lowered, written)
