"""A pod template that somebody else wrote: it takes little time and memory, runs nothing, and does
not change what the launch sets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from drumline.base.errors import UsageError
from drumline.cli import launch_command
from drumline.launch.kubernetes import manifest_text
from drumline.launch.pod_template import merged_manifest, read_pod_template
from tests.attacks.limits import bounded
from tests.unit.launch.test_kubernetes import TASK, manifest

yaml = pytest.importorskip("yaml", reason="pip install 'drumline[kubernetes]' brings it")
LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]\n" for number in range(1, 10)
)
ATTACKS = {
    "aliases": (LAUGHS, "line 1 has an anchor or an alias; write the value out"),
    "a cycle": ("spec: &a {b: *a}", "line 1 has an anchor or an alias; write the value out"),
    "merge keys": ("spec: {<<: {a: 1}}", "a key in line 1 is not text"),
    "a tag": (
        "spec: !!python/object/apply:os.system [touch trap]",
        "line 1 has the tag 'tag:yaml.org,2002:python/object/apply:os.system'; only plain values are read",
    ),
    "depth in flows": ("spec: " + "[" * 30_000, "line 1 is nested too deep"),
    "depth in blocks": ("- " * 30_000, "line 1 is nested too deep"),
    "a long number": ("spec: {a: " + "9" * 60_000 + "}", "the number in line 1 is too long"),
    "a sexagesimal": ("spec: {a: " + "1:" * 30_000 + "1}", "the number in line 1 is too long"),
    "other line ends": ("spec: {}\u2028kind: Job", "it is a 'Job', not a pod"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_template_is_refused_at_once(name: str, tmp_path: Path) -> None:
    text, message = ATTACKS[name]
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    with bounded(), pytest.raises(UsageError) as raised:
        read_pod_template(path)
    assert str(raised.value).splitlines()[0] == f"--pod-template {path}: {message}"
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("letter", ["#", "a", "- a\n", "{", "? "])
def test_a_huge_template_is_not_read(letter: str, tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(letter * (1 << 20))
    with bounded(), pytest.raises(UsageError, match="cannot be read: it has more than 65,536 b"):
        read_pod_template(path)


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    os.mkfifo(path)
    with bounded(), pytest.raises(UsageError, match="cannot be read"):
        read_pod_template(path)


@pytest.mark.parametrize(
    "text",
    [
        'x"\n    hostNetwork: true\n    y: "',
        "x\n---\nkind: ClusterRoleBinding",
        "x\u2028hostPID: true",
        "{{ 7 * 7 }}",
        "# x",
        "\\",
        "*x",
        "!!python/name:os",
    ],
)
def test_no_text_leaves_its_field(text: str, tmp_path: Path) -> None:
    """In a value, in a key, and in a label."""
    template = {"metadata": {"annotations": {"a": text, text: "b"}}, "spec": {"x": [text]}}
    job = manifest(program=TASK, variables={"NOTE": text})
    merged = merged_manifest(manifest_text(job, "job"), template, tmp_path)
    _, described = yaml.safe_load_all(merged)
    pod = described["spec"]["template"]
    assert pod["metadata"]["annotations"] == {"a": text, text: "b"}
    assert pod["spec"]["x"] == [text]
    assert pod["spec"].keys().isdisjoint({"hostNetwork", "hostPID", "y"})
    (container,) = pod["spec"]["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["NOTE"] == text


@pytest.mark.parametrize(
    "container",
    [
        {"image": "evil"},
        {"command": ["sh", "-c", "id"]},
        {"args": []},
        {"env": [{"name": "DRUMLINE_SECRET", "value": "known"}]},
        {"env": [{"name": "DRUMLINE_SSH", "value": "sh -c id"}]},
        {"env": [{"name": "MASTER_ADDR", "value": "elsewhere"}]},
    ],
)
def test_the_launch_is_what_the_user_asked_for(container: dict[str, Any], tmp_path: Path) -> None:
    template = {"spec": {"containers": [{"name": "node", **container}]}}
    text = manifest_text(manifest(program=TASK), "job")
    with pytest.raises(UsageError, match=r"spec\.containers\[node\]\..*: the launch sets it"):
        merged_manifest(text, template, tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        ["--image", 'i"\nhostPID: true'],
        ["--node-selector", 'a="b"'],
        ["--node-selector", "a=b\n"],
        ["--toleration", "a:Never"],
        ["--rdma", "x: 1"],
        ["--mem", "1Gi\n"],
        ["--shm", "$(X)"],
        ["--pvc", "a:/runs\n"],
        ["--queue", "a/b"],
        ["--env", "A B=1"],
        ["--env", "DRUMLINE_SECRET=known"],
        ["--env", "MASTER_ADDR=elsewhere"],
    ],
)
def test_flags_take_only_what_has_their_form(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    image = [] if flags[0] == "--image" else ["--image", "i"]
    words = ["--kubernetes", *image, *flags, "digits"]
    with pytest.raises(Exception, match=flags[0]):
        launch_command.run(words)
    assert capsys.readouterr().out == ""
