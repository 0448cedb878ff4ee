"""A job as Kubernetes manifests: Kubeflow's TrainJob, its older PyTorchJob, or a plain indexed Job. Nothing is applied.

In each pod torchrun's agent starts the ranks, and the pods meet by c10d at the first one. What differs is who makes the
pods and says which is which and where the first is: Kubeflow by the variables it sets, the plain Job by its index and a
headless Service. A task's pods run `drumline launch`, which names whoever is missing; a script's image need not have
drumline in it, so its pods run torchrun, unless the job may go on with fewer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from drumline.launch.cluster.yaml import to_yaml
from drumline.launch.torchrun import DEFAULT_PORT, OWN_STORE, RUN_ID, Program
from drumline.net.secrets import VARIABLE

Api = Literal["v2", "v1", "job"]
Object = dict[str, Any]
RUNS = "/runs"
# A Service's name is the strictest: it becomes a label of the domain name system, with `-NUMBER` behind it in a pod's.
NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")
RUNTIME = "torch-distributed"
POD_ADDRESS = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
# The kubelet writes it there for pods of an indexed Job.
POD_NUMBER = {
    "name": "POD_NUMBER",
    "valueFrom": {
        "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    },
}
BACKOFF_PER_NODE = 3
SECRET_KEY = "secret"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the user wants of the cluster."""

    name: str
    image: str
    program: Program
    namespace: str | None = None
    num_nodes: int = 1
    num_procs: int = 1
    num_gpus: int = 0
    """Of each node."""
    claim: str | None = None
    """A PersistentVolumeClaim that all nodes can write to; mounted at /runs."""
    max_restarts: int = 0
    min_nodes: int | None = None
    """The job goes on with so many pods; None needs all."""

    @property
    def has_launcher(self) -> bool:
        """Whether drumline is in the image, as far as is known."""
        return self.program.is_task or self.min_nodes is not None

    @property
    def has_secret(self) -> bool:
        """Whether pods have to know each other."""
        return self.num_nodes > 1 and self.has_launcher

    @property
    def secret(self) -> str:
        """The name of the object that holds it."""
        return f"{self.name}-secret"

    @property
    def run_folder(self) -> str:
        return f"{RUNS}/{self.name}"


def manifest_text(manifest: Manifest, api: Api) -> str:
    """The YAML that `kubectl apply -f` takes."""
    makers = {"v2": _train_job, "v1": _pytorch_job, "job": _indexed_job}
    needs = {
        "v2": f"Needs Kubeflow Trainer 2.2 or later, with its runtime {RUNTIME}.",
        "v1": "Needs the Kubeflow Training Operator (kubeflow.org/v1).",
        "job": "Needs nothing beside Kubernetes 1.27 or later.",
    }
    comments = ["Written by drumline launch --kubernetes; apply it with kubectl apply -f FILE.", needs[api]]
    if manifest.claim is None:
        comments.append("Without --claim the run folder ends with its pod: nothing can be resumed.")
    if manifest.has_secret:
        namespace = f" --namespace {manifest.namespace}" if manifest.namespace else ""
        comments += [
            f"Before it, so that nobody else in the cluster can end or misdirect the job ({VARIABLE}):",
            f"  openssl rand -hex 32 | tr -d '\\n' | kubectl create secret generic {manifest.secret}{namespace} "
            f"--from-file={SECRET_KEY}=/dev/stdin",
        ]
    return to_yaml(makers[api](manifest), comments=comments)


def wrong_name(flag: str, name: str) -> str | None:
    """What is wrong with the name of an object, if anything."""
    if NAME.fullmatch(name):
        return None
    return f"{flag}: {name!r} is no name in Kubernetes: small letters, digits and dashes, 50 at most, a letter first"


def _train_job(manifest: Manifest) -> list[Object]:
    trainer = {
        "image": manifest.image,
        "command": _agent(manifest, "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)", "$(PET_NODE_RANK)"),
        "args": _program_words(manifest),
        "env": _variables(manifest),
        "numNodes": manifest.num_nodes,
        "numProcPerNode": manifest.num_procs,
        **({"resourcesPerNode": _resources(manifest)} if manifest.num_gpus else {}),
    }
    pod = {"volumes": _volumes(manifest), "containers": [{"name": "node", "volumeMounts": _mounts(manifest)}]}
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {
        "manager": "drumline.launch/manifest",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
    spec = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer, "runtimePatches": [patch]}
    return [_object("trainer.kubeflow.org/v1alpha1", "TrainJob", manifest, spec)]


def _pytorch_job(manifest: Manifest) -> list[Object]:
    def replicas(count: int, is_host: bool) -> Object:
        command = _agent(manifest, "$(MASTER_ADDR):$(MASTER_PORT)", "$(RANK)", is_host=is_host)
        # The operator writes a restart policy of its own into the pods; theirs has to be left out.
        return {
            "replicas": count,
            "restartPolicy": "OnFailure",
            "template": {"spec": _pod(manifest, "pytorch", command)},
        }

    specs = {"Master": replicas(1, True)}
    if manifest.num_nodes > 1:
        specs["Worker"] = replicas(manifest.num_nodes - 1, False)
    spec = {
        "nprocPerNode": str(manifest.num_procs),
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "backoffLimit": BACKOFF_PER_NODE * manifest.num_nodes,
        },
        "pytorchReplicaSpecs": specs,
    }
    return [_object("kubeflow.org/v1", "PyTorchJob", manifest, spec)]


def _indexed_job(manifest: Manifest) -> list[Object]:
    labels = {"app.kubernetes.io/name": manifest.name, "app.kubernetes.io/managed-by": "drumline"}
    service = {
        "clusterIP": "None",
        # Pods meet before they are ready, and the first has to know its own name.
        "publishNotReadyAddresses": True,
        "selector": labels,
        "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
    }
    command = _agent(manifest, "$(MASTER_ADDR):$(MASTER_PORT)", "$(POD_NUMBER)")
    pod = {
        "subdomain": manifest.name,
        "restartPolicy": "OnFailure",
        **_pod(manifest, "node", command),
    }
    pod["containers"][0]["env"] = [
        {"name": "MASTER_ADDR", "value": f"{manifest.name}-0.{manifest.name}"},
        {"name": "MASTER_PORT", "value": str(DEFAULT_PORT)},
        dict(POD_NUMBER),
        *_variables(manifest),
    ]
    job = {
        "completionMode": "Indexed",
        "completions": manifest.num_nodes,
        "parallelism": manifest.num_nodes,
        "backoffLimit": BACKOFF_PER_NODE * manifest.num_nodes,
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return [
        _object("v1", "Service", manifest, service, labels=labels),
        _object("batch/v1", "Job", manifest, job, labels=labels),
    ]


def _object(
    api_version: str, kind: str, manifest: Manifest, spec: Object, *, labels: Mapping[str, str] | None = None
) -> Object:
    metadata: Object = {"name": manifest.name}
    if manifest.namespace:
        metadata["namespace"] = manifest.namespace
    if labels:
        metadata["labels"] = labels
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def _pod(manifest: Manifest, container: str, command: list[str]) -> Object:
    described = {
        "name": container,
        "image": manifest.image,
        "command": command,
        "args": _program_words(manifest),
        "env": _variables(manifest),
        **({"resources": _resources(manifest)} if manifest.num_gpus else {}),
        "volumeMounts": _mounts(manifest),
    }
    return {"containers": [described], "volumes": _volumes(manifest)}


def _agent(manifest: Manifest, endpoint: str, node_rank: str, *, is_host: bool | None = None) -> list[str]:
    """The agent of a pod; Kubernetes itself puts the values of `$(NAME)` in, no shell does."""
    return (
        _launcher(manifest, endpoint, node_rank)
        if manifest.has_launcher
        else _torchrun(manifest, endpoint, is_host)
    )


def _launcher(manifest: Manifest, endpoint: str, node_rank: str) -> list[str]:
    words = ["drumline", "launch", "--procs", str(manifest.num_procs)]
    words += ["--max-restarts", str(manifest.max_restarts)]
    if manifest.num_nodes == 1:
        # Said all the same: an operator gives a pod a RANK, and the launcher would take itself for one.
        return [*words, "--nodes", "1", "--node-rank", "0"]
    words += ["--nodes", str(manifest.num_nodes), "--node-rank", node_rank, "--master", endpoint]
    if manifest.min_nodes is not None:
        words += ["--nnodes", f"{manifest.min_nodes}:{manifest.num_nodes}"]
    # Pods do not find each other by their host names.
    return [*words, "--address", "$(POD_IP)"]


def _torchrun(manifest: Manifest, endpoint: str, is_host: bool | None) -> list[str]:
    words = ["torchrun", "--nnodes", str(manifest.num_nodes), "--nproc-per-node", str(manifest.num_procs)]
    words += ["--max-restarts", str(manifest.max_restarts), "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", endpoint, "--rdzv-id", RUN_ID]
    if is_host is not None:
        words += ["--rdzv-conf", f"is_host={'true' if is_host else 'false'}"]
    # Pods do not find each other by their host names.
    return [*words, "--local-addr", "$(POD_IP)"]


def _program_words(manifest: Manifest) -> list[str]:
    program = manifest.program
    # Of a task the launcher wants the name and its arguments, without the verb.
    own = ["--", *(program.words[1:] if program.is_task else program.words)]
    return [_literal(word) for word in (own if manifest.has_launcher else program.of_torchrun())]


def _literal(word: str) -> str:
    """Kubernetes reads `$(X)` as a variable and `$$` as `$`."""
    return word.replace("$", "$$")


def _variables(manifest: Manifest) -> list[Object]:
    name, _, value = OWN_STORE.partition("=")
    variables: list[Object] = [dict(POD_ADDRESS), {"name": name, "value": value}]
    if manifest.has_secret:
        reference = {"name": manifest.secret, "key": SECRET_KEY, "optional": True}
        variables.append({"name": VARIABLE, "valueFrom": {"secretKeyRef": reference}})
    if manifest.claim and not manifest.program.is_task:
        variables.append({"name": "OUTPUT_DIR", "value": _literal(manifest.run_folder)})
    return variables


def _resources(manifest: Manifest) -> Object:
    return {"limits": {"nvidia.com/gpu": manifest.num_gpus}}


def _volumes(manifest: Manifest) -> list[Object]:
    # A container's own /dev/shm has 64 MB: too little for NCCL and for loader workers.
    volumes: list[Object] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if manifest.claim:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": manifest.claim}})
    return volumes


def _mounts(manifest: Manifest) -> list[Object]:
    mounts: list[Object] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # noqa: S108
    if manifest.claim:
        mounts.append({"name": "runs", "mountPath": RUNS})
    return mounts
