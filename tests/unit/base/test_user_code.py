from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import drumline
from drumline.base.errors import UsageError
from drumline.base.user_code import (
    build_accepted,
    is_class_spec,
    is_users_file,
    load_class,
    load_function,
)


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "neighbour_of_own.py").write_text("WIDTH = 3\n")
    file = tmp_path / "own_code_under_test.py"
    file.write_text("from neighbour_of_own import WIDTH\nclass Net:\n    width = WIDTH\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield file
    for name in ("own_code_under_test", "neighbour_of_own"):
        sys.modules.pop(name, None)


def test_a_class_is_loaded_from_a_file_and_its_neighbours(own_file: Path) -> None:
    net_class = load_class(f"{own_file}:Net")
    assert net_class.width == 3
    assert load_class(f"{own_file}:Net") is net_class
    assert sys.modules[net_class.__module__].Net is net_class


def test_a_class_is_loaded_from_a_module() -> None:
    assert load_class("collections:OrderedDict").__name__ == "OrderedDict"


def test_only_names_with_a_colon_point_into_user_code() -> None:
    assert is_class_spec("nets.py:Net")
    assert not is_class_spec("mini_resnet")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nets.py:", "does not name a class"),
        ("nowhere/nets.py:Net", r"there is no file nowhere/nets.py \(looked in "),
        ("no_such_package.nets:Net", "there is no module 'no_such_package.nets'"),
        (
            "collections:OrderdDict",
            "collections has no class 'OrderdDict'; did you mean 'OrderedDict'",
        ),
    ],
)
def test_bad_names_are_explained(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_class(spec)


MANY_CLASSES = """
from collections import Counter, OrderedDict
class Base: pass
class Trains(Base): pass
class Counts(Counter): pass
"""


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Count", "did you mean 'Counts'?"),  # not Counter, which is only imported
        ("Train", "did you mean 'Trains'?"),
        ("Bases", "did you mean 'Base'?"),
        ("X", "known: Base, Counts, Trains"),
    ],
)
def test_a_name_that_is_not_there_means_what_fits_and_is_the_files_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "many_classes", raising=False)
    (tmp_path / "many_classes.py").write_text(MANY_CLASSES)
    with pytest.raises(UsageError) as caught:
        load_class(f"{tmp_path}/many_classes.py:{name}")
    assert str(caught.value) == f"{tmp_path}/many_classes.py has no class {name!r}; {meant}"


def test_a_file_that_would_shadow_a_loaded_module_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("class Net: pass\n")
    with pytest.raises(
        UsageError, match=r"a module named 'json' is already loaded\n  try: rename json.py"
    ):
        load_class(f"{tmp_path / 'json.py'}:Net")


def test_a_file_whose_name_is_no_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v1.2.py").write_text("class Net: pass\n")
    with pytest.raises(
        UsageError, match=r"'v1.2' is not a valid module name\n  try: rename the file"
    ):
        load_class(f"{tmp_path / 'v1.2.py'}:Net")


def test_an_import_that_fails_inside_the_file_keeps_its_own_error(own_file: Path) -> None:
    own_file.write_text("import a_package_that_is_not_there\nclass Net: pass\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_class(f"{own_file}:Net")


def build(*, width: int, depth: int = 1) -> tuple[int, int]:
    return width, depth


def test_a_builder_gets_what_it_accepts() -> None:
    assert build_accepted(build, {"width": 2, "other": 9}, options={"depth": 5}, what="net") == (
        2,
        5,
    )
    assert build_accepted(build, {"width": 2}, options={"width": 7}, what="net") == (7, 1)


def test_an_option_that_a_builder_does_not_take_is_named() -> None:
    with pytest.raises(UsageError, match="net takes no option 'dept'; did you mean 'depth'"):
        build_accepted(build, {"width": 2}, options={"dept": 5}, what="net")


def test_an_argument_that_nothing_provides_is_named() -> None:
    with pytest.raises(
        UsageError, match="net needs width, which neither the dataset nor the settings provide"
    ):
        build_accepted(build, {}, options={}, what="net")


def test_a_function_is_named_the_same_way() -> None:
    assert load_function("os.path:join") is os.path.join
    with pytest.raises(UsageError) as raised:
        load_function("os.path")
    assert str(raised.value) == (
        "'os.path' does not name a function\n  try: write path/to/file.py:function or package.module:function"
    )
    with pytest.raises(UsageError, match="has no function 'joint'; did you mean 'join'"):
        load_function("os.path:joint")


def test_libraries_whose_names_begin_like_torch_or_drumline_are_not_taken_for_them() -> None:
    for package in (torch, drumline):
        folder = Path(str(package.__file__)).parent
        assert not is_users_file(f"{folder}/nn/modules.py")
        assert is_users_file(f"{folder}vision/transforms.py")
