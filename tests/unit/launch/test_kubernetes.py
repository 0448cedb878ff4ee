"""Manifests, checked offline: core objects against Kubernetes' own schemas, a TrainJob by
Kubeflow's own models, a PyTorchJob by the fields of its API types; their pods are core objects
again, and checked as such."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from drumline.launch.kubernetes import Api, KubernetesJob, manifest_text, wrong_object_name
from drumline.launch.node_plan import Program

WHY = "pip install 'drumline[dev]' brings it"
yaml = pytest.importorskip("yaml", reason=WHY)
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=WHY)

SCRIPT = Program(("train.py", "--note", "a: 'b' #c\n$(HOME) \u00e9"))
TASK = Program(("train", "digits", "--run", "/runs/digits"), is_task=True)
# kubeflow/training-operator, pkg/apis/kubeflow.org/v1 (1.9).
RUN_POLICY = {
    *("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"),
    *("schedulingPolicy", "suspend", "managedBy"),
}


def manifest(**changes: Any) -> KubernetesJob:
    fields: dict[str, Any] = {
        "name": "digits",
        "image": "me/train:1",
        "program": SCRIPT,
        "num_nodes": 2,
    }
    return KubernetesJob(**{**fields, "num_procs": 4, "num_gpus": 4, "claim": "shared", **changes})


def objects(api: Api, **changes: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest_text(manifest(**changes), api)))


def validate(described: dict[str, Any]) -> None:
    kubernetes_validate.validate(described, "1.30", strict=True)


def validate_pod(spec: dict[str, Any]) -> None:
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec})


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    "changes", [{}, {"num_gpus": 0, "claim": None, "num_nodes": 1, "namespace": "team"}]
)
def test_the_plain_job_and_its_service_are_valid(changes: dict[str, Any]) -> None:
    service, job = objects("job", **changes)
    validate(service)
    validate(job)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert {described["metadata"].get("namespace") for described in (service, job)} == {
        changes.get("namespace")
    }


def test_the_schemas_do_catch_a_wrong_field() -> None:
    _, job = objects("job")
    job["spec"]["completion"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)


def test_the_rendezvous_of_the_plain_job_is_at_its_first_pod() -> None:
    service, job = objects("job")
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (pod["restartPolicy"], spec["backoffLimit"]) == ("OnFailure", 6)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    container = pod["containers"][0]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["MASTER_ADDR"] == "digits-0.digits"
    assert variables["MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])
    assert variables["OUTPUT_DIR"] == "/runs/digits"
    assert after(container["command"], "--rdzv-endpoint") == "$(MASTER_ADDR):$(MASTER_PORT)"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}


@pytest.mark.parametrize("api", ["v2", "v1", "job"])
def test_pods_of_several_nodes_read_the_secret_of_the_job_which_is_not_in_the_manifest(
    api: Api,
) -> None:
    text = manifest_text(manifest(program=TASK, namespace="team"), api)
    assert (
        "create secret generic digits-secret --namespace team --from-file=secret=/dev/stdin" in text
    )
    # Not optional: without the secret no pod starts, and nothing runs unsealed.
    reference = {"name": "digits-secret", "key": "secret"}
    entry = {"name": "DRUMLINE_SECRET", "valueFrom": {"secretKeyRef": reference}}
    loaded = list(_entries(list(yaml.safe_load_all(text))))
    assert loaded
    assert all(loaded_entry == entry for loaded_entry in loaded)
    assert "DRUMLINE_SECRET" not in manifest_text(manifest(program=TASK, num_nodes=1), api), (
        "it is alone"
    )
    assert "DRUMLINE_SECRET" not in manifest_text(manifest(program=SCRIPT), api), (
        "torchrun does not use it"
    )


def _entries(value: Any) -> Iterator[dict[str, Any]]:
    """Whatever is named DRUMLINE_SECRET."""
    if isinstance(value, dict) and value.get("name") == "DRUMLINE_SECRET":
        yield value
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _entries(inner)


def test_the_train_job_has_the_fields_of_its_api() -> None:
    (job,) = objects("v2", program=TASK)
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"].keys() == {"runtimeRef", "trainer", "runtimePatches"}
    # Kubeflow's own models leave out what they do not know, so what comes back is what they do.
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason=WHY
    )  # which takes seconds to load
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["command"][:2] == ["drumline", "launch"]
    assert after(trainer["command"], "--master") == "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
    assert after(trainer["command"], "--node-rank") == "$(PET_NODE_RANK)"
    assert trainer["args"] == ["--", *TASK.words[1:]]
    # Trainer sets these itself and refuses a TrainJob that does.
    assert not [entry["name"] for entry in trainer["env"] if entry["name"].startswith("PET_")]
    (patch,) = job["spec"]["runtimePatches"]
    assert patch.keys() == {"manager", "trainingRuntimeSpec"}
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert (node["name"], pod["containers"][0].keys()) == ("node", {"name", "volumeMounts"})
    container = {
        **pod["containers"][0],
        **{name: trainer[name] for name in ("image", "command", "args", "env")},
        "resources": trainer["resourcesPerNode"],
    }
    validate_pod({**pod, "containers": [container]})


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_the_pytorch_job_has_one_master_and_the_rest_workers(num_nodes: int) -> None:
    (job,) = objects("v1", num_nodes=num_nodes)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["spec"].keys() == {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"}
    assert job["spec"]["nprocPerNode"] == "4"
    assert job["spec"]["runPolicy"].keys() <= RUN_POLICY
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert {name: spec["replicas"] for name, spec in specs.items()} == (
        {"Master": 1} if num_nodes == 1 else {"Master": 1, "Worker": 2}
    )
    for name, spec in specs.items():
        assert spec.keys() == {"replicas", "restartPolicy", "template"}
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert (
            after(container["command"], "--rdzv-conf") == f"is_host={str(name == 'Master').lower()}"
        )
        validate_pod(spec["template"]["spec"])


@pytest.mark.parametrize("api", ["v2", "v1", "job"])
def test_a_job_that_may_shrink_has_drumlines_own_launcher_in_its_pods(api: Api) -> None:
    text = manifest_text(manifest(num_nodes=3, min_nodes=2), api)
    assert "torchrun" not in text
    assert '- "--nnodes"\n' in text
    assert '- "2:3"\n' in text
    alone = manifest_text(manifest(num_nodes=1, program=TASK), api)
    assert "--master" not in alone
    assert re.search(r'- "--node-rank"\n +- "0"\n', alone), (
        "a PyTorchJob's pod has a RANK of the operator's"
    )


@pytest.mark.parametrize("api", ["v2", "v1", "job"])
def test_in_every_form_arguments_are_unchanged_and_memory_is_shared(api: Api) -> None:
    text = manifest_text(manifest(), api)
    assert yaml.safe_load_all(text)
    assert "$$(HOME)" in text, "Kubernetes would put a value in the place of $(HOME)"
    described = repr(list(yaml.safe_load_all(text)))
    assert repr(["--", "train.py", "--note", "a: 'b' #c\n$$(HOME) \u00e9"]) in described
    assert "{'name': 'shared-memory', 'emptyDir': {'medium': 'Memory'}}" in described
    assert "{'name': 'shared-memory', 'mountPath': '/dev/shm'}" in described
    assert "{'claimName': 'shared'}" in described
    assert "Without --claim" not in text
    assert "# Without --claim the run folder is lost with its pod" in manifest_text(
        manifest(claim=None), api
    )


@pytest.mark.parametrize("name", ["Digits", "1a", "a_b", "-a", "a-", "a" * 51, ""])
def test_names_that_kubernetes_would_refuse(name: str) -> None:
    assert wrong_object_name("--name", name) == (
        f"--name: {name!r} is not a Kubernetes name: at most 50 lowercase letters, digits and dashes, a letter first"
    )
    assert wrong_object_name("--name", "my-job-2") is None
