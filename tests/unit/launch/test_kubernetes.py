"""Manifests, checked offline: core objects against Kubernetes' own schemas, a JobSet and a TrainJob
by the models of Kubeflow's package, a PyTorchJob by those of the older one; the pods of all forms
are core objects again, and checked as such."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from drumline.cli.kubernetes_file import toleration, wrong_claims, wrong_for_kubernetes
from drumline.config import FlagValues
from drumline.launch.kubernetes import (
    RESERVED,
    Api,
    KubernetesJob,
    manifest_text,
)
from drumline.launch.node_plan import Program
from drumline.launch.pod_template import pods_of

WHY = "pip install 'drumline[dev]' brings it"
yaml = pytest.importorskip("yaml", reason=WHY)
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=WHY)

SCRIPT = Program(("train.py", "--note", "a: 'b' #c\n$(HOME) \u00e9\u2028\U0001f941"))
TASK = Program(("train", "digits", "--run", "/runs/digits"), is_task=True, run="/runs/digits")
FORMS: tuple[Api, ...] = get_args(Api)
VERSIONS = ("1.29", "1.37")


def manifest(**changes: Any) -> KubernetesJob:
    fields: dict[str, Any] = {
        "name": "digits",
        "program": SCRIPT,
        "num_nodes": 2,
        "num_procs": 4,
        "claims": {"/runs": "shared"},
    }
    flags = FlagValues({"image": "me/train:1", **changes.pop("flags", {})})
    return KubernetesJob(flags=flags, **{**fields, **changes})


EVERYTHING: dict[str, Any] = {
    "program": TASK,
    "flags": {
        "namespace": "team",
        "queue": "gpus",
        "cpus": 90,
        "mem": "1.5Ti",
        "shm": "64Gi",
        "efa": "4",
        "rdma": "rdma/cards:2",
        "node-selector": ["node.kubernetes.io/type=p4", "node.kubernetes.io/type=p5"],
    },
    "claims": {"/runs": "shared", "/data": "images"},
    "tolerations": [toleration("nvidia.com/gpu"), toleration("team=a:NoSchedule")],
    "variables": {"NCCL_DEBUG": "INFO", "NOTE": "$(HOME)"},
}


def objects(api: Api, **changes: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest_text(manifest(**changes), api)))


def validate(described: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(described, version, strict=True)


def validate_pod(template: dict[str, Any]) -> None:
    metadata = {"name": "x", **template["metadata"]}
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    "changes",
    [{}, EVERYTHING, {"flags": {"gpus": 0, "namespace": "team"}, "claims": {}, "num_nodes": 1}],
)
def test_the_plain_job_and_its_service_are_valid(changes: dict[str, Any]) -> None:
    service, job = objects("job", **changes)
    validate(service)
    validate(job)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert {described["metadata"].get("namespace") for described in (service, job)} == {
        changes.get("flags", {}).get("namespace")
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
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    container = pod["containers"][0]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["MASTER_ADDR"] == "digits-0.digits"
    assert variables["MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])
    assert variables["OUTPUT_DIR"] == "/runs/digits"
    assert after(container["command"], "--rdzv-endpoint") == "$(MASTER_ADDR):$(MASTER_PORT)"


@pytest.mark.parametrize("api", ["job", "jobset", "trainjob"])
def test_disruptions_and_saves_are_no_failures_and_wrong_settings_end_the_job(api: Api) -> None:
    (spec,) = (spec for spec in _mappings(objects(api)) if "podFailurePolicy" in spec)
    disruption, saved, usage = spec["podFailurePolicy"]["rules"]
    condition = {"type": "DisruptionTarget", "status": "True"}
    assert disruption == {"action": "Ignore", "onPodConditions": [condition]}
    assert (saved["action"], saved["onExitCodes"]["values"]) == ("Ignore", [75])
    assert (usage["action"], usage["onExitCodes"]["values"]) == ("FailJob", [2])
    # Kubernetes refuses a policy of failures with any other.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["backoffLimit"] == (6 if api == "job" else 0), "a JobSet starts all pods again"


@pytest.mark.parametrize("api", FORMS)
def test_a_pod_is_confined_and_has_requests_limits_and_time_to_save(api: Api) -> None:
    templates = list(pods_of(objects(api, **EVERYTHING)))
    assert len(templates) == (2 if api == "pytorchjob" else 1)
    for template in templates:
        validate_pod(template)
        pod = template["spec"]
        (container,) = pod["containers"]
        user = {name: pod["securityContext"][name] for name in ("runAsNonRoot", "runAsUser")}
        assert user == {"runAsNonRoot": True, "runAsUser": 1000}
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
        }
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["resources"]["limits"] == {
            "cpu": "90",
            "memory": "1.5Ti",
            "nvidia.com/gpu": "4",
            "vpc.amazonaws.com/efa": "4",
            "hugepages-2Mi": "5120Mi",
            "rdma/cards": "2",
        }
        assert pod["nodeSelector"] == {"node.kubernetes.io/type": "p5"}
        assert pod["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists"},
            {"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"},
        ]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
        sources = {path: volumes[name] for path, name in mounts.items()}
        assert sources == {
            "/dev/shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
            "/tmp": {"emptyDir": {}},
            "/runs": {"persistentVolumeClaim": {"claimName": "shared"}},
            "/data": {"persistentVolumeClaim": {"claimName": "images"}},
        }
        probe = container["readinessProbe"]["exec"]["command"]
        assert probe == ["drumline", "watch", "/runs/digits", "--once", "--running"]
        assert after(container["command"], "--grace") == "90"
        assert pod["terminationGracePeriodSeconds"] == 120
        variables = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert variables["NOTE"] == "$$(HOME)"


@pytest.mark.parametrize("api", FORMS)
def test_without_rdma_no_capability_and_without_a_volume_no_readiness(api: Api) -> None:
    job = manifest(program=TASK, flags={"gpus": 0}, claims={})
    template = next(pods_of(list(yaml.safe_load_all(manifest_text(job, api)))))
    (container,) = template["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"] == {"cpu": "16", "memory": "64Gi"}
    assert "readinessProbe" not in container, "the other pods do not see the status"
    runs = [volume for volume in template["spec"]["volumes"] if volume["name"] == "runs"]
    assert runs == [{"name": "runs", "emptyDir": {}}], "the root file system is read-only"


def test_a_single_rank_has_no_watchdog_that_could_tell_whether_it_is_ready() -> None:
    assert "readinessProbe" in manifest_text(manifest(program=TASK, num_nodes=1), "job")
    assert "readinessProbe" not in manifest_text(
        manifest(program=TASK, num_nodes=1, num_procs=1), "job"
    )


@pytest.mark.parametrize("api", FORMS)
def test_a_queued_job_is_suspended_until_kueue_starts_it(api: Api) -> None:
    documents = objects(api, flags={"queue": "gpus"})
    queued = [
        described
        for described in documents
        if "kueue.x-k8s.io/queue-name" in described["metadata"]["labels"]
    ]
    assert queued == documents[-1:], "the workload alone"
    spec = queued[0]["spec"]
    assert (spec["runPolicy"] if api == "pytorchjob" else spec)["suspend"] is True
    assert "suspend" not in manifest_text(manifest(), api)


@pytest.mark.parametrize("api", FORMS)
def test_pods_of_several_nodes_read_the_secret_of_the_job_which_is_not_in_the_manifest(
    api: Api,
) -> None:
    text = manifest_text(manifest(program=TASK, flags={"namespace": "team"}), api)
    assert (
        "create secret generic digits-secret --namespace team --from-file=secret=/dev/stdin" in text
    )
    # Not optional: without the secret no pod starts, and nothing runs unsealed.
    reference = {"name": "digits-secret", "key": "secret"}
    entry = {"name": "DRUMLINE_SECRET", "valueFrom": {"secretKeyRef": reference}}
    mappings = _mappings(list(yaml.safe_load_all(text)))
    entries = [mapping for mapping in mappings if mapping.get("name") == "DRUMLINE_SECRET"]
    assert entries
    assert all(loaded_entry == entry for loaded_entry in entries)
    alone = manifest_text(manifest(program=TASK, num_nodes=1), api)
    assert "DRUMLINE_SECRET" not in alone
    script = manifest_text(manifest(program=SCRIPT), api)
    assert "DRUMLINE_SECRET" not in script, "torchrun does not use it"


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _mappings(inner)


def test_the_kubeflow_models_know_every_field() -> None:
    """They leave out what they do not know, so what comes back is what they do."""
    # takes seconds to load
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=WHY)
    (job_set,) = objects("jobset", **EVERYTHING)
    runtime, train_job = objects("trainjob", **EVERYTHING)
    for model, described in (
        (models.JobsetV1alpha2JobSet, job_set),
        (models.TrainerV1alpha1TrainingRuntime, runtime),
        (models.TrainerV1alpha1TrainJob, train_job),
    ):
        assert model.from_dict(described).to_dict() == described

    # The Job in them is a core object.
    for spec in (job_set["spec"], runtime["spec"]["template"]["spec"]):
        template = spec["replicatedJobs"][0]["template"]
        metadata = {"name": "x", **template.get("metadata", {})}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
        validate({**job, "spec": template["spec"]})


def test_the_first_pod_of_a_job_set_has_its_name_of_the_network() -> None:
    (job_set,) = objects("jobset")
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert job_set["spec"]["network"] == network
    (container,) = next(pods_of(job_set))["spec"]["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["MASTER_ADDR"] == "digits-node-0-0.digits"
    assert job_set["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == [
        "PodFailurePolicy"
    ]


def test_the_train_job_names_its_runtime() -> None:
    runtime, job = objects("trainjob", program=TASK)
    assert job["spec"] == {
        "runtimeRef": {"kind": "TrainingRuntime", "name": "digits"},
        "trainer": {"numNodes": 2, "numProcPerNode": 4},
    }
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # By this label and name the trainer knows the pods that train.
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (replicated["name"], replicated["template"]["metadata"]["labels"]) == ("node", labels)
    (container,) = next(pods_of(runtime))["spec"]["containers"]
    assert container["name"] == "node"
    assert after(container["command"], "--master") == "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
    assert after(container["command"], "--node-rank") == "$(PET_NODE_RANK)"
    assert container["args"] == ["--", *TASK.words[1:]]
    # The trainer sets these itself and refuses a job that does.
    assert not [entry["name"] for entry in container["env"] if entry["name"].startswith("PET_")]


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_the_pytorch_job_has_one_master_and_the_rest_workers(num_nodes: int) -> None:
    (job,) = objects("pytorchjob", num_nodes=num_nodes)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["spec"].keys() == {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"}
    assert job["spec"]["nprocPerNode"] == "4"
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert {name: spec["replicas"] for name, spec in specs.items()} == (
        {"Master": 1} if num_nodes == 1 else {"Master": 1, "Worker": 2}
    )
    for name, spec in specs.items():
        assert spec.keys() == {"replicas", "restartPolicy", "template"}
        assert "restartPolicy" not in spec["template"]["spec"], "the operator sets it"
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        is_host = f"is_host={str(name == 'Master').lower()}"
        assert after(container["command"], "--rdzv-conf") == is_host
    # kubeflow-training has these models; the rest of what it needs is not installed here.
    run_policy = {
        *("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"),
        *("schedulingPolicy", "suspend", "managedBy"),
    }
    assert job["spec"]["runPolicy"].keys() <= run_policy


@pytest.mark.parametrize("api", FORMS)
def test_a_job_that_may_shrink_has_drumlines_own_launcher_in_its_pods(api: Api) -> None:
    text = manifest_text(manifest(num_nodes=3, min_nodes=2), api)
    assert "torchrun" not in text
    assert '- "--nnodes"\n' in text
    assert '- "2:3"\n' in text
    assert '- "--join-timeout=3600"\n' in text, "a pod may wait long for a machine"
    alone = manifest_text(manifest(num_nodes=1, program=TASK), api)
    assert "--master" not in alone
    assert re.search(r'- "--node-rank"\n +- "0"\n', alone), (
        "a PyTorchJob's pod has a RANK of the operator's"
    )


@pytest.mark.parametrize("api", FORMS)
def test_in_every_form_arguments_are_unchanged(api: Api) -> None:
    text = manifest_text(manifest(), api)
    assert text.isascii()
    for template in pods_of(list(yaml.safe_load_all(text))):
        (container,) = template["spec"]["containers"]
        # Kubernetes would put a value in the place of $(HOME).
        arguments = [word.replace("$", "$$") for word in SCRIPT.words]
        assert container["args"] == ["--", *arguments]
    assert "Without --pvc" not in text
    without = manifest_text(manifest(claims={}), api)
    assert "# Without --pvc the run folder is lost with its pod" in without


@pytest.mark.parametrize("name", ["Digits", "1a", "a_b", "-a", "a-", "a" * 51, ""])
def test_names_that_kubernetes_would_refuse(name: str) -> None:
    flags = FlagValues({"image": "i", "name": name, "queue": "my-job-2"})
    assert list(wrong_for_kubernetes(flags)) == [
        f"--name: {name!r} is not a Kubernetes name: at most 50 lowercase letters, digits and dashes, a letter first"
    ]


def test_volumes_that_cannot_be_mounted() -> None:
    assert list(wrong_claims(["runs", "data:/data", "more:/data/more"])) == []
    flags = FlagValues({"image": "i", "pvc": ["A b", "a:data", "runs"]})
    assert list(wrong_for_kubernetes(flags)) == [
        "--pvc: 'A b' is not NAME or NAME:/PATH",
        "--pvc: 'a:data' is not NAME or NAME:/PATH",
    ]
    assert list(wrong_claims(["a", "b:/runs", "c:/tmp", "d:/x/../etc"])) == [
        "--pvc: 2 volumes at /runs; give another NAME:/PATH",
        "--pvc: /tmp cannot be the path of a volume; give another NAME:/PATH",
        "--pvc: /x/../etc cannot be the path of a volume; give another NAME:/PATH",
    ]


def test_what_a_launch_sets_in_a_pod_cannot_be_set_by_others() -> None:
    """Each variable of a manifest is reserved, or one that a user may change."""
    names = set[str]()
    for api in FORMS:
        for template in pods_of(objects(api, program=TASK)):
            names |= {entry["name"] for entry in template["spec"]["containers"][0]["env"]}
    assert {name for name in names if not RESERVED.fullmatch(name)} == {"HOME", "USER"}
