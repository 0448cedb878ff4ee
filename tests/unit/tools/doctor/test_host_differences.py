"""What differs across hosts: the odd ones are named, with values, on 2, 3 and 256 hosts; real
folders are compared."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.tools.doctor.cluster import compare_hosts
from drumline.tools.doctor.finding import Finding
from drumline.tools.doctor.machine import folder_hashes
from drumline.tools.doctor.machine.folder_hashes import code_facts, data_facts, files_below
from drumline.tools.doctor.machine.machine_checks import machine_findings
from tests.unit.tools.doctor.machines import gpu, healthy, network


def findings(**hosts: dict[str, Any]) -> list[Finding]:
    return compare_hosts({name: healthy(name, **changes) for name, changes in hosts.items()})


def test_hosts_that_are_alike_have_no_findings() -> None:
    assert compare_hosts({name: healthy(name) for name in ("a", "b", "c")}) == []
    assert compare_hosts({"a": healthy("a")}) == []


ODD: list[tuple[dict[str, Any], str, str]] = [
    (
        {"python": "3.12.1"},
        "warning",
        "Python differs across hosts: 3.12.3 on a and b; 3.12.1 on c",
    ),
    (
        {"python": "3.11.9"},
        "problem",
        "Python differs across hosts: 3.12.3 on a and b; 3.11.9 on c",
    ),
    (
        {"torch": "2.11.0"},
        "problem",
        "torch differs across hosts: 2.13.0+cu128 on a and b; 2.11.0 on c",
    ),
    ({"cuda": None}, "problem", "CUDA (of torch) differs across hosts: 12.8 on a and b; none on c"),
    ({"nccl": "2.26.2"}, "problem", "NCCL differs across hosts: 2.27.5 on a and b; 2.26.2 on c"),
    (
        {"driver": "560.1"},
        "warning",
        "driver differs across hosts: 570.86.15 on a and b; 560.1 on c",
    ),
    (
        {"gpus": [gpu(0)]},
        "warning",
        "GPUs differs across hosts: 2 x NVIDIA H100 80GB HBM3 on a and b; 1 x NVIDIA H100 80GB HBM3 on c",
    ),
    (
        {"platform": "Linux 6.8 aarch64"},
        "warning",
        "architecture differs across hosts: x86_64 on a and b; aarch64 on c",
    ),
    (
        {"disk": {"file_system": "ext4"}},
        "warning",
        "file system of the run folder differs across hosts: nfs4 on a and b; ext4 on c",
    ),
    (
        {"interfaces": [network("eth0", "10.0.0.3", 9001)]},
        "warning",
        "MTU differs across hosts: 1500 on a and b; 9001 on c",
    ),
    (
        {"packages": {"drumline": "0.0.9", "numpy": "2.4.6", "torch": "2.13.0"}},
        "problem",
        "drumline differs across hosts: 0.1.0 on a and b; 0.0.9 on c",
    ),
    (
        {"packages": {"drumline": "0.1.0", "numpy": "1.26.4", "pillow": "13.0"}},
        "warning",
        "2 packages differ across hosts: numpy 2.4.6 on a and b; 1.26.4 on c; pillow none on a and b; 13.0 on c",
    ),
    (
        {"variables": {"NCCL_PROTO": "LL", "NCCL_SOCKET_IFNAME": "eth1"}},
        "problem",
        "NCCL_PROTO differs across hosts: unset on a and b; LL on c",
    ),
    (
        {"variables": {"NCCL_IB_TIMEOUT": "22", "NCCL_DEBUG": "INFO"}},
        "warning",
        "NCCL_IB_TIMEOUT differs across hosts: unset on a and b; 22 on c",
    ),
]


def test_the_odd_one_of_three_is_named() -> None:
    for changes, level, what in ODD:
        for order in (("a", "b", "c"), ("c", "a", "b")):
            differences = findings(**{name: changes if name == "c" else {} for name in order})
            assert [(finding.level, finding.where, finding.what) for finding in differences] == [
                (level, "c", what)
            ]
            assert differences[0].fix


def test_of_two_hosts_the_first_is_right() -> None:
    differences = findings(a={"torch": "2.11.0"}, b={})
    assert [(finding.where, finding.what) for finding in differences] == [
        ("b", "torch differs across hosts: 2.11.0 on a; 2.13.0+cu128 on b")
    ]


def test_what_one_host_lacks_is_not_compared() -> None:
    """Its own findings tell that the folder is not there."""
    code = {"folder": "src", "files": {"a.py": "1"}, "hash": "x"}
    unreachable = {"folder": "src", "unreachable": "x"}
    assert findings(a={"code": code}, b={"code": unreachable}) == []


def test_256_hosts_take_little_time_and_few_lines() -> None:
    files = {f"part/{number}.py": f"{number:08x}" for number in range(1000)}
    packages = {f"package-{number}": "1.0" for number in range(300)}
    hosts = {}
    for number in range(256):
        code = {"folder": "src", "files": files, "hash": "x"}
        installed = {**packages, "drumline": "0.1.0"}
        if number >= 56:
            installed.update({f"package-{place}": "2.0" for place in range(14)})
        if number == 7:
            code = {**code, "files": {**files, "part/1.py": "other"}, "hash": "y"}
            installed["package-299"] = "3.0"
        hosts[f"node-{number}"] = healthy(
            f"node-{number}", packages=installed, code=code, torch=f"2.{11 + number % 2}"
        )
    start = time.process_time()
    differences = compare_hosts(hosts)
    assert time.process_time() - start < 5
    assert all(len(finding.what) < 1500 and len(finding.where) < 80 for finding in differences)
    by_check = {finding.what.partition(":")[0]: finding for finding in differences}
    torch = by_check["torch differs across hosts"]
    assert torch.where == "node-1, node-3, node-5, node-7 and 124 more"
    assert torch.what == (
        "torch differs across hosts: 2.11 on node-0, node-2, node-4, node-6 and 124 more; "
        "2.12 on node-1, node-3, node-5, node-7 and 124 more"
    )
    many = by_check["15 packages differ across hosts"]
    assert many.where == "node-0, node-1, node-2, node-3 and 52 more"
    assert many.what.endswith("; and 5 more")
    code_finding = next(finding for finding in differences if finding.check == "code")
    assert (code_finding.where, code_finding.what) == (
        "node-7",
        "the code in src differs from that on node-0, node-1, node-2, node-3 and 251 more: part/1.py differs",
    )
    assert len(differences) == 3


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_first_files_of_other_code_are_named(tmp_path: Path) -> None:
    files = {f"{letter}_dot_py": letter for letter in "klmnopq"}
    a = write(tmp_path / "a", train_dot_py="1", model__net_dot_py="2", notes_dot_md="x", **files)
    b = write(tmp_path / "b", train_dot_py="1", model__net_dot_py="2", notes_dot_md="y", **files)
    c = write(tmp_path / "c", train_dot_py="changed", model__new_dot_py="3")
    differences = findings(
        a={"code": code_facts(a)}, b={"code": code_facts(b)}, c={"code": code_facts(c)}
    )
    assert [(finding.level, finding.where, finding.what) for finding in differences] == [
        (
            "problem",
            "c",
            f"the code in {c} differs from that on a and b: k.py is missing, l.py is missing, m.py is missing, "
            "model/net.py is missing and 6 more",
        )
    ]
    assert (
        differences[0].fix
        == "drumline launch --sync copies the code first; or use git pull or rsync"
    )


def test_code_is_what_is_written_by_people(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        train_dot_py="1",
        conf__lr_dot_yaml="2",
        weights_dot_bin="3",
        _dot_git__hook_dot_py="4",
        runs__x__task_dot_py="5",
        env__pyvenv_dot_cfg="6",
        env__lib_dot_py="7",
        mine__environment_dot_json="8",
        mine__events__notes_dot_json="9",
        out__copy_dot_py="10",
        data__labels_dot_json="11",
    )
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.py").write_text("12")
    (folder / "loop").symlink_to(folder)
    facts = code_facts(folder, skip=[folder / "out", folder / "data"])
    assert list(facts["files"]) == ["conf/lr.yaml", "train.py"]
    before = facts["hash"]
    (folder / "train.py").rename(folder / "train2.py")
    assert code_facts(folder, skip=[folder / "out", folder / "data"])["hash"] != before
    with pytest.raises(FileNotFoundError):
        code_facts(folder / "none")


def test_of_much_code_the_first_files_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"{number:03}_dot_py": str(number) for number in range(20)}
    a = write(tmp_path / "a", **files)
    b = write(tmp_path / "b", **{**files, "009_dot_py": "changed"})
    monkeypatch.setattr(folder_hashes, "MAX_CODE_FILES", 5)
    assert list(code_facts(a)["files"]) == ["000.py", "001.py", "002.py", "003.py", "004.py"]
    assert findings(a={"code": code_facts(a)}, b={"code": code_facts(b)}) == []
    write(b, **{"003_dot_py": "changed"})
    differences = findings(a={"code": code_facts(a)}, b={"code": code_facts(b)})
    assert [finding.what for finding in differences] == [
        f"the code in {b} differs from that on a: 003.py differs"
    ]


def data(folder: Path, count: int = 40) -> Path:
    for number in range(count):
        path = folder / f"class-{number % 3}" / f"{number:04}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * 100)
    return folder


def test_different_data_is_found_by_its_count_its_bytes_or_its_names(tmp_path: Path) -> None:
    a = data(tmp_path / "a")
    b = data(tmp_path / "b")
    facts = data_facts(a)
    assert (facts["files"], facts["bytes"], facts["complete"]) == (40, 4000, True)
    assert json.loads(json.dumps(facts)) == facts

    def said() -> list[str]:
        differences = findings(a={"data": facts}, b={"data": data_facts(b)})
        assert all(
            (finding.level, finding.where, finding.check) == ("problem", "b", "data")
            for finding in differences
        )
        assert all(
            finding.fix == "copy it again, or mount the same volume" for finding in differences
        )
        return [
            finding.what.removeprefix(f"the data in {b} differs from that on a: ")
            for finding in differences
        ]

    assert said() == []
    (b / "class-0" / "0000.bin").rename(b / "class-0" / "zero.bin")
    assert said() == ["names or sizes of files differ"]
    (b / "class-0" / "zero.bin").unlink()
    assert said() == ["39 files instead of 40 and 3900 bytes instead of 4000"]


def test_a_dataset_may_be_one_file_or_be_missing(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    file.write_bytes(b"x" * 310_000)
    facts = data_facts(file)
    assert (facts["files"], facts["bytes"]) == (1, 310_000)
    file.write_bytes(b"x" * 310_001)
    assert data_facts(file)["hash"] != facts["hash"]
    with pytest.raises(FileNotFoundError):
        data_facts(tmp_path / "none")


def test_of_much_data_the_first_files_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_hashes, "MAX_DATA_FILES", 13)
    whole = data_facts(data(tmp_path / "a", 13))
    part = data_facts(data(tmp_path / "b"))
    assert (whole["complete"], part["files"], part["complete"]) == (True, 13, False)
    part = data_facts(data(tmp_path / "c"))
    differences = findings(a={"data": part}, b={"data": data_facts(tmp_path / "b")})
    assert [(finding.level, finding.where, finding.what) for finding in differences] == [
        ("note", "a and b", "the data has many files; the first 20,000 were compared")
    ]
    first = next(files_below(tmp_path / "b", enters=lambda entry: True))
    Path(first.path).write_bytes(b"short")
    differences = findings(a={"data": part}, b={"data": data_facts(tmp_path / "b")})
    assert [finding.level for finding in differences] == ["problem", "note"]
    assert differences[0].what.startswith(f"the data in {tmp_path / 'b'} differs from that on a: ")


def test_a_folder_that_takes_too_long_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = data(write(tmp_path / "a", train_dot_py="1"))
    facts = {"code": code_facts(a), "data": data_facts(a)}
    monkeypatch.setattr(folder_hashes, "TIME_LIMIT_S", -1)
    slow = {"code": code_facts(a), "data": data_facts(a)}
    assert slow["code"] == slow["data"] == {"folder": str(a), "slow": True}
    assert findings(a=facts, b=slow) == []
    assert [finding.line() for finding in machine_findings(healthy("b", **slow))] == [
        f"note: b: reading {a} takes over a second: the {name} is not compared"
        for name in ("code", "data")
    ]


def test_a_walk_is_sorted_and_survives_what_it_cannot_read(tmp_path: Path) -> None:
    data(tmp_path / "x", 5)
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "again").symlink_to(tmp_path / "x")
    files = [(entry.name, entry.size) for entry in files_below(tmp_path, enters=lambda entry: True)]
    names = [name for name, _ in files]
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert ("broken", -1) in files
    assert "pipe" not in names, "to open it would wait for ever"
    assert len([name for name in names if name.endswith(".bin")]) == 5, (
        "a folder that is linked twice is read once"
    )
    assert names[-1] == "x.txt"
