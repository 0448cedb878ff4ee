"""Drumline as two wheels: a real pip installs them, and asks an index for everything but
Drumline."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PathDistribution, requires, version
from pathlib import Path
from typing import Any

import pytest

import drumline
from drumline.base.errors import UsageError
from drumline.launch.aws.install import name_of
from drumline.launch.aws.own_wheels import (
    NOT_IN_NAME,
    build_wheel,
    is_for_nodes,
    third_party_requirements,
)


def wheel(folder: Path, name: str, version: str) -> Path:
    """The least that pip takes."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


class Index:
    """A package index that has one version of what it was given, and notes what it was asked
    for."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        index = self

        class Pages(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.strip("/").rpartition("/")[2]
                path = folder / name
                if path.is_file():
                    body = path.read_bytes()
                else:
                    index.asked.append(name)
                    files = [path.name for path in folder.glob(f"{name.replace('-', '_')}-*.whl")]
                    body = "".join(f'<a href="/files/{file}">{file}</a>' for file in files).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/simple"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(name="index")
def make_index(tmp_path: Path) -> Iterator[Index]:
    folder = tmp_path / "index"
    folder.mkdir()
    for requirement in requires("drumline") or ():
        name = NOT_IN_NAME.split(requirement)[0]
        wheel(folder, name.lower().replace("-", "_"), "2999.0")
    wheel(folder, "drumline", "2999.0")
    index = Index(folder)
    yield index
    index.close()


@pytest.mark.soak
def test_pip_asks_an_index_for_everything_but_drumline(tmp_path: Path, index: Index) -> None:
    """As nodes of SkyPilot and ParallelCluster install it: with its dependencies. The index has a
    drumline of someone else, with a higher version."""
    built = build_wheel()
    path = tmp_path / built.name
    path.write_bytes(built.content)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--target",
        str(tmp_path / "site"),
        "--no-compile",
        "--no-cache-dir",
    ]
    options = ["--isolated", "--index-url", index.url, "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, *options, f"{path}[aws,storage]"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert set(index.asked) == {name_of(word) for word in third_party_requirements()}
    installed = tmp_path / "site/drumline/__init__.py"
    assert installed.read_bytes() == Path(drumline.__file__).read_bytes()


@pytest.mark.parametrize(
    ("line", "is_needed"),
    [
        ("torch>=2.11", True),
        ('boto3>=1.36; extra == "aws"', True),
        ("fsspec; extra == 'storage'", True),
        ('tomli>=2; python_version < "3.12"', True),
        ('boto3>=1.36; python_version > "3" and extra == "aws"', True),
        ('pytest; extra == "dev"', False),
        ("mlflow; extra == 'mlflow'", False),
    ],
)
def test_only_requirements_of_extras_that_a_node_has_no_use_for_are_left_out(
    line: str, is_needed: bool
) -> None:
    assert is_for_nodes(line) is is_needed


@pytest.fixture(name="left_by_setuptools")
def make_left_by_setuptools(tmp_path: Path) -> Path:
    """The folder that setuptools leaves in a checkout when it builds an editable installation."""
    folder = tmp_path / "drumline.egg-info"
    folder.mkdir()
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: drumline\nVersion: 0.0.1\n")
    return folder


def test_an_installation_without_metadata_makes_no_wheel(
    left_by_setuptools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As old versions of setuptools make it: pip could not install the wheel, on every node."""
    monkeypatch.setattr(
        "importlib.metadata.distributions", lambda name: [PathDistribution(left_by_setuptools)]
    )
    with pytest.raises(UsageError) as error:
        build_wheel()
    assert error.value.what == (
        "this installation of drumline cannot be copied: no drumline-*.dist-info has its METADATA"
    )
    assert error.value.next_step == "install drumline again with pip 23 or newer"


def test_what_setuptools_left_in_a_checkout_is_passed_over(
    left_by_setuptools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder comes first on the path of `python -m`."""
    monkeypatch.syspath_prepend(left_by_setuptools.parent)
    assert version("drumline") == "0.0.1"
    assert build_wheel().name == "drumline-0.1.0-py3-none-any.whl"
    assert any(requirement.startswith("torch==") for requirement in third_party_requirements())


def test_the_wheels_are_whole_and_the_same_each_time(tmp_path: Path) -> None:
    built = build_wheel()
    assert built.name == "drumline-0.1.0-py3-none-any.whl"
    assert built == build_wheel(), "a node would install them again at every launch"
    (tmp_path / "drumline.whl").write_bytes(built.content)
    with zipfile.ZipFile(tmp_path / "drumline.whl") as archive:
        names = archive.namelist()
        assert (
            "drumline = drumline.cli:main"
            in archive.read("drumline-0.1.0.dist-info/entry_points.txt").decode()
        )
    for name in (
        "drumline/launch/aws/cluster.yaml",
        "drumline/launch/aws/prepare.sh",
        "drumline/py.typed",
        "drumline/cli/__init__.py",
    ):
        assert name in names
    assert not [name for name in names if "__pycache__" in name]
