"""The user's pod template: how it is read, merged and refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from drumline.base.errors import UsageError
from drumline.launch.kubernetes import Api, manifest_text
from drumline.launch.pod_template import (
    TemplateError,
    merge_into,
    merged_manifest,
    pods_of,
    read_pod_template,
    yaml_text,
)
from tests.unit.launch.test_kubernetes import TASK, manifest, validate_pod

yaml = pytest.importorskip("yaml", reason="pip install 'drumline[kubernetes]' brings it")
FORMS: tuple[Api, ...] = get_args(Api)
OWN = """
metadata:
  annotations: {team: vision, "on": 'yes'}
spec:
  serviceAccountName: trainer
  priorityClassName: low
  tolerations:
    - {key: spot, operator: Exists}
  nodeSelector:
    zone: a
  imagePullSecrets: [{name: registry}]
  securityContext: {runAsUser: 4000, fsGroup: null}
  terminationGracePeriodSeconds: 600
  containers:
    - name: node
      workingDir: /code
      env:
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
        - {name: HOME, value: /home/me}
      securityContext: {readOnlyRootFilesystem: false}
      resources: {limits: {memory: 900Gi}}
      volumeMounts:
        - {mountPath: /tmp, name: scratch}
      ports: [{containerPort: 9400}]
    - name: exporter
      image: exporter:1
  volumes:
    - {name: scratch, hostPath: {path: /mnt/nvme}}
    - {name: runs, hostPath: {path: /mnt/runs}}
"""


def merged(api: Api, text: str, tmp_path: Path, **changes: Any) -> list[dict[str, Any]]:
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    job = manifest(program=TASK, **changes)
    result = merged_manifest(manifest_text(job, api), read_pod_template(path), path)
    return list(yaml.safe_load_all(result))


@pytest.mark.parametrize("api", FORMS)
def test_a_template_is_merged_by_the_keys_of_kubernetes(api: Api, tmp_path: Path) -> None:
    name = "pytorch" if api == "pytorchjob" else "node"
    text = OWN.replace("name: node\n", f"name: {name}\n")
    changes = {"flags": {"node-selector": ["gpu=a100"]}, "tolerations": [{"key": "gpu"}]}
    for template in pods_of(merged(api, text, tmp_path, **changes)):
        validate_pod(template)
        assert template["metadata"]["annotations"] == {"team": "vision", "on": "yes"}
        pod = template["spec"]
        assert pod["serviceAccountName"] == "trainer"
        assert pod["nodeSelector"] == {"gpu": "a100", "zone": "a"}
        assert pod["tolerations"] == [{"key": "gpu"}, {"key": "spot", "operator": "Exists"}]
        assert pod["securityContext"]["runAsUser"] == 4000
        assert "fsGroup" not in pod["securityContext"], "null takes a field away"
        assert pod["terminationGracePeriodSeconds"] == 600
        node, exporter = pod["containers"]
        assert exporter == {"name": "exporter", "image": "exporter:1"}
        assert node["workingDir"] == "/code"
        assert node["securityContext"]["readOnlyRootFilesystem"] is False
        assert node["securityContext"]["allowPrivilegeEscalation"] is False
        assert node["resources"]["limits"]["memory"] == "900Gi"
        assert node["resources"]["limits"]["nvidia.com/gpu"] == "4"
        variables = {entry["name"]: entry for entry in node["env"]}
        assert variables["HOME"]["value"] == "/home/me"
        assert "secretKeyRef" in variables["HF_TOKEN"]["valueFrom"]
        assert variables["DRUMLINE_SECRET"]
        mounts = {mount["mountPath"]: mount["name"] for mount in node["volumeMounts"]}
        assert (mounts["/tmp"], mounts["/dev/shm"]) == ("scratch", "shared-memory")
        volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
        assert volumes["runs"] == {"hostPath": {"path": "/mnt/runs"}}, "a volume has one source"


@pytest.mark.parametrize("api", FORMS)
def test_nothing_else_of_the_manifest_changes(api: Api, tmp_path: Path) -> None:
    text = manifest_text(manifest(program=TASK), api)
    assert merged(api, "spec: {}", tmp_path) == list(yaml.safe_load_all(text))
    written = merged_manifest(text, {"spec": {}}, Path("pod.yaml"))
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert written.splitlines()[: len(comments)] == comments


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 2, "d": 4}, "env": [1, 2]}),
        ({"b": {"$patch": "replace", "c": 2}}, {"a": 0, "b": {"c": 2}, "env": [1, 2]}),
        ({"b": {"$patch": "delete"}}, {"a": 0, "env": [1, 2]}),
        ({"b": None}, {"a": 0, "env": [1, 2]}),
        ({"b": {"$patch": "merge", "c": 2}}, {"a": 0, "b": {"c": 2, "d": 4}, "env": [1, 2]}),
        ({"env": [{"name": "x", "$patch": "delete"}]}, {"a": 0, "b": {"c": 3, "d": 4}, "env": [2]}),
        (
            {"env": [{"name": "x", "$patch": "replace", "v": 7}]},
            {"a": 0, "b": {"c": 3, "d": 4}, "env": [7, 2]},
        ),
        (
            {"env": [{"$patch": "replace"}, {"name": "z", "v": 7}]},
            {"a": 0, "b": {"c": 3, "d": 4}, "env": [7]},
        ),
        ({"args": ["x"]}, {"a": 0, "b": {"c": 3, "d": 4}, "env": [1, 2], "args": ["x"]}),
    ],
)
def test_the_rules_of_a_strategic_merge(patch: dict[str, Any], expected: dict[str, Any]) -> None:
    items = [{"name": "x", "v": 1, "w": 1}, {"name": "y", "v": 2}]
    target: dict[str, Any] = {"a": 0, "b": {"c": 3, "d": 4}, "env": items}
    merge_into(target, patch, "")
    assert {**target, "env": [item["v"] for item in target["env"]]} == expected
    assert not any("$patch" in item for item in target["env"])
    if patch.get("env") == [{"name": "x", "$patch": "replace", "v": 7}]:
        assert "w" not in target["env"][0]


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"b": {"$patch": "drop"}}, "b: $patch is 'drop', not delete, replace or merge"),
        ({"b": {"$retainKeys": []}}, "b.$retainKeys: of the directives only $patch is read"),
        ({"env": [{"value": 1}]}, "env: an item has no name, by which it is merged"),
        ({"env": [3]}, "env: an item has no name, by which it is merged"),
        ({"env": {"x": 1}}, "env: it is not a list"),
        ({"b": 3}, "b: it is not a mapping"),
    ],
)
def test_what_cannot_be_merged(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(TemplateError) as raised:
        merge_into({"b": {}, "env": []}, patch, "")
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("{restartPolicy: Always}", ["spec.restartPolicy: the launch sets it"]),
        (
            "{subdomain: x, hostname: y}",
            ["spec.subdomain: the launch", "spec.hostname: the launch"],
        ),
        (
            "{terminationGracePeriodSeconds: 30}",
            ["spec.terminationGracePeriodSeconds: the ranks need 120 s to save; --grace sets"],
        ),
        (
            "{containers: [{name: node, command: [sh], image: other}]}",
            [
                "spec.containers[node].image: the launch sets it; give --image",
                "spec.containers[node].command: the launch sets it",
            ],
        ),
        (
            "{containers: [{name: node, $patch: delete}]}",
            ["spec.containers[node]: the launch needs"],
        ),
        ("{containers: {$patch: delete}}", ["spec.containers[node]: the launch needs it"]),
        (
            "{containers: [{name: node, env: [{name: RANK, value: '0'}]}]}",
            ["spec.containers[node].env[RANK]: the launch sets it"],
        ),
        (
            "{containers: [{name: node, env: [{name: DRUMLINE_SECRET, $patch: delete}]}]}",
            ["spec.containers[node].env[DRUMLINE_SECRET]: the launch sets it"],
        ),
        (
            "{containers: [{name: node, env: [{$patch: replace}]}]}",
            ["env[MASTER_ADDR]: the launch sets it", "env[DRUMLINE_SECRET]: the launch sets it"],
        ),
        ("{$patch: replace, hostNetwork: true}", ["spec.containers[node]: the launch needs it"]),
    ],
)
def test_what_contradicts_the_launch_is_named(
    text: str, problems: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        merged("job", f"spec: {text}", tmp_path)
    for problem in problems:
        assert problem in str(raised.value)
    assert f"in --pod-template {tmp_path}/pod.yaml:" in str(raised.value)


def test_the_labels_by_which_the_service_finds_pods_stay(tmp_path: Path) -> None:
    text = "metadata: {labels: {app.kubernetes.io/name: x}}\nspec: {}"
    with pytest.raises(UsageError, match=r"metadata.labels.app.kubernetes.io/name: the launch"):
        merged("job", text, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 documents; one pod template is needed"),
        ("spec: {}\n---\nspec: {}", "2 documents; one pod template is needed"),
        ("[]", "the template is not a mapping"),
        ("kind: Job\nspec: {}", "it is a 'Job', not a pod"),
        (
            "spec: {}\nstatus: {}",
            "the template has 'status'; only apiVersion, kind, metadata, spec",
        ),
        ("metadata: {name: x}\nspec: {}", "metadata has 'name'; only labels, annotations can be"),
        ("metadata: {}", "it has no spec"),
        ("spec: {a: 1, a: 2}", "'a' in line 1 is there twice"),
        ("spec: {1: 2, ? [a] : 3}", "a key in line 1 is not text"),
        ("spec: [", "it is not YAML: while parsing a flow"),
        ("spec: {a: 0b__}", "it is not YAML: invalid literal"),
    ],
)
def test_a_file_that_is_no_pod_template(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        read_pod_template(path)
    assert str(raised.value).startswith(f"--pod-template {path}: {message}")
    next_step = "give the metadata and spec of a pod, as under `template:` of a Job"
    assert raised.value.next_step == next_step


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    message = re.escape(f"--pod-template {tmp_path}/none cannot be read: No such file or directory")
    with pytest.raises(UsageError, match=message):
        read_pod_template(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="binary cannot be read: it is not text"):
        read_pod_template(tmp_path / "binary")


def test_without_pyyaml_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pod.yaml").write_text("spec: {}")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match="--pod-template needs PyYAML, which is not installed"):
        read_pod_template(tmp_path / "pod.yaml")


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": [1, [2, {"c": None}], {}, []], "yes": True, "x y": 1.5}},
        {"text": ["a: b", "yes", "1e3", "0x10", "# no", "a\nb\t\x00\x85\u2028", "\U0001f941'\"\\"]},
        [{"a": [{"b": 1, "c": 2}]}, "x"],
        {},
    ],
)
def test_what_is_written_is_read_as_the_same(value: Any) -> None:
    assert list(yaml.safe_load_all(yaml_text([value, value]))) == [value, value]
