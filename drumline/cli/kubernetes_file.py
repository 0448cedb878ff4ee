"""`drumline launch --kubernetes`: its flags, their mistakes, and the manifest."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from drumline.base.errors import PreflightError, UsageError
from drumline.base.job_secret import new_secret
from drumline.cli.launch_request import LaunchRequest
from drumline.config import FlagTable, FlagValues, switch
from drumline.config.flags import REPEATED
from drumline.config.schema import SwitchOr
from drumline.launch.hosts import least_nodes
from drumline.launch.kubernetes import (
    GRACE_S,
    JOIN_TIMEOUT_S,
    RESERVED,
    Api,
    KubernetesJob,
    manifest_text,
)
from drumline.launch.pod_template import merged_manifest, read_pod_template
from drumline.launch.ssh.hosts_job import chosen_variables, wrong_variables

EFA = (
    Annotated[bool | str, SwitchOr("N", r"[1-9]\d?")],
    "[N]",
    "Elastic Fabric Adapters: pods: as many for each; ParallelCluster: on, or --no-efa.",
)
OF_KUBERNETES: FlagTable = {
    "kubernetes": switch(
        "Write a manifest for kubectl; nothing is applied unless --apply is given."
    ),
    "api": (
        Api,
        "job | jobset | trainjob | pytorchjob",
        "An indexed Job with a headless Service, a JobSet, or Kubeflow's TrainJob or older PyTorchJob [job].",
    ),
    "image": (
        str,
        "IMAGE",
        "The container image; it contains the code, and drumline for a task or with --nnodes.",
    ),
    "name": (str, "NAME", "The name of the job in the cluster [that of the task or script]."),
    "namespace": (str, "NAME", "The namespace [kubectl's own]."),
    "queue": (str, "NAME", "The queue of Kueue in which the job waits."),
    "pvc": (
        REPEATED,
        "NAME[:PATH]",
        "A PersistentVolumeClaim and where pods mount it [/runs, for run folders]; may be repeated.",
    ),
    "shm": (str, "SIZE", "The size of /dev/shm, a part of --mem [4Gi for each rank]."),
    "rdma": (
        str,
        "NAME[:N]",
        "The resource of RDMA network cards for each pod, such as rdma/hca_shared_devices_a:1.",
    ),
    "efa": EFA,
    "node-selector": (
        REPEATED,
        "KEY=VALUE",
        "Only on nodes with this label; may be repeated.",
    ),
    "toleration": (
        REPEATED,
        "KEY[=VALUE][:EFFECT]",
        "Also on nodes with this taint, as kubectl taint writes it; may be repeated.",
    ),
    "pod-template": (
        str,
        "FILE",
        "YAML with the metadata and spec of a pod, merged into the pods (a strategic merge): for all other fields.",
    ),
    "apply": switch(
        "Pass the manifest to `kubectl apply`, in kubectl's own context; a secret is created first."
    ),
}
# A Service's name has the strictest rules: it becomes a DNS label, and a pod's name has `-NUMBER`
# after it.
NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")
NAME_FORM = "a Kubernetes name: at most 50 lowercase letters, digits and dashes, a letter first"
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")
QUANTITY = re.compile(r"[1-9][0-9]{0,8}(\.[0-9]{1,3})?([kMGTP]|[KMGTP]i)?")
_DOMAIN = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LABEL = re.compile(rf"(?P<key>({_DOMAIN}/)?{_LABEL})=(?P<value>({_LABEL})?)")
TAINT = re.compile(
    rf"(?P<key>({_DOMAIN}/)?{_LABEL})(=(?P<value>({_LABEL})?))?"
    r"(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
RDMA = re.compile(rf"(?P<resource>{_DOMAIN}/{_LABEL})(:(?P<count>[1-9][0-9]{{0,2}}))?")
CLAIM = re.compile(rf"(?P<claim>{_DOMAIN})(:(?P<path>(/[A-Za-z0-9_.-]+)+))?")
RUNS = "/runs"
TAKEN_PATHS = ("/tmp", "/dev/shm")  # noqa: S108 - of the pod, which has its own
# Flags with values of one form, and what the form is.
_FORMS = {
    "name": (NAME, NAME_FORM),
    "namespace": (NAME, NAME_FORM),
    "queue": (NAME, NAME_FORM),
    "image": (IMAGE, "the name of an image"),
    "mem": (QUANTITY, "a quantity, such as 64Gi"),
    "shm": (QUANTITY, "a quantity, such as 64Gi"),
    "pvc": (CLAIM, "NAME or NAME:/PATH"),
    "rdma": (RDMA, "PREFIX/NAME or PREFIX/NAME:N"),
    "node-selector": (LABEL, "KEY=VALUE, as a label of a node"),
    "toleration": (TAINT, "KEY[=VALUE][:NoSchedule|PreferNoSchedule|NoExecute]"),
}
_OF_LAUNCHER = ("join-timeout", "last-call", "lost-after")


def wrong_for_kubernetes(verb_flags: FlagValues) -> Iterator[str]:
    """Every mistake in its flags."""
    if "image" not in verb_flags:
        yield "--image: is missing; a pod needs a container image that contains the code"
    for name, (form, description) in _FORMS.items():
        values = verb_flags.get(name, [])
        for value in values if isinstance(values, list) else [values]:
            if not form.fullmatch(value):
                yield f"--{name}: {value!r} is not {description}"
    yield from wrong_claims(claim for claim in verb_flags.get("pvc", []) if CLAIM.fullmatch(claim))
    if isinstance(verb_flags.efa, bool):
        yield "--efa: needs the number of adapters of a pod, as in --efa 4"
    words = verb_flags.get("env", [])
    yield from wrong_variables(words, os.environ)
    for name in (word.partition("=")[0] for word in words):
        if RESERVED.fullmatch(name):
            yield f"--env {name}: the launch sets it in the pods"


def toleration(taint: str) -> dict[str, str]:
    """The toleration of `KEY[=VALUE][:EFFECT]`, as `kubectl taint` writes it."""
    match = TAINT.fullmatch(taint)
    assert match is not None  # it was checked
    operator = "Exists" if match["value"] is None else "Equal"
    fields = {"key": match["key"], "operator": operator}
    fields |= {name: match[name] for name in ("value", "effect") if match[name]}
    return fields


def claim_paths(claims: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The path and the claim of each `NAME[:PATH]`."""
    for word in claims:
        name, _, path = word.partition(":")
        yield path or RUNS, name


def wrong_claims(claims: Iterable[str]) -> Iterator[str]:
    """The mistakes in the values of --pvc, each of which has its form."""
    paths = [path for path, _ in claim_paths(claims)]
    for path in dict.fromkeys(paths):
        if paths.count(path) > 1:
            yield f"--pvc: {paths.count(path)} volumes at {path}; give another NAME:/PATH"
        if path in TAKEN_PATHS or ".." in path.split("/"):
            yield f"--pvc: {path} cannot be the path of a volume; give another NAME:/PATH"


def kubernetes_text(request: LaunchRequest) -> tuple[KubernetesJob, str]:
    """The job, and its manifest."""
    job = _job(request)
    text = manifest_text(job, request.flags.get("api", "job"))
    if "pod-template" in request.flags:
        path = Path(request.flags.pod_template)
        text = merged_manifest(text, read_pod_template(path), path)
    return job, text


def _job(request: LaunchRequest) -> KubernetesJob:
    """What the manifest is made from. Raises where the flags do not fit the task or script."""
    verb_flags = request.flags
    name = verb_flags.name or request.name
    if not NAME.fullmatch(name):
        raise UsageError(
            f"no --name, and the job would be named after {request.target}: {name!r} is not {NAME_FORM}",
            next_step="give it a --name",
        )

    num_nodes = verb_flags.get("nodes", 1)
    least = least_nodes(verb_flags.nnodes, num_nodes, known_from="--nodes")
    flags = {"join-timeout": JOIN_TIMEOUT_S}
    flags |= {flag: verb_flags[flag] for flag in _OF_LAUNCHER if flag in verb_flags}
    job = KubernetesJob(
        name=name,
        program=request.program(("--run", f"{RUNS}/{name}")),
        flags=verb_flags,
        num_nodes=num_nodes,
        num_procs=verb_flags.get("procs", 1),
        claims=dict(claim_paths(verb_flags.get("pvc", []))),
        tolerations=[toleration(taint) for taint in verb_flags.get("toleration", [])],
        variables=chosen_variables(verb_flags.get("env", []), os.environ),
        max_restarts=request.restarts(least),
        min_nodes=least,
        grace_s=verb_flags.get("grace", GRACE_S),
        launcher_flags=[f"--{flag}={value}" for flag, value in flags.items()],
    )
    if not job.has_launcher and (unused := [flag for flag in _OF_LAUNCHER if flag in verb_flags]):
        raise UsageError(
            f"--{unused[0]}: the pods of a script run torchrun, which has no such flag",
            next_step="give --nnodes MIN: as well, with drumline in the image, or leave it out",
        )
    return job


def apply(job: KubernetesJob, text: str) -> None:
    """With kubectl, in the user's own context; its output is shown as it is."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UsageError(
            "--apply needs kubectl, which is not installed here",
            next_step="install kubectl, or write the manifest with --out and apply it elsewhere",
        )

    if job.has_secret:
        _create_secret(kubectl, job)
    done = subprocess.run([kubectl, "apply", "-f", "-"], input=text, encoding="utf-8", check=False)
    if done.returncode:
        raise PreflightError(
            f"kubectl refused the manifest (exit code {done.returncode}); its output is above",
            next_step="inspect the manifest with --out FILE; `kubectl config current-context` names the cluster",
        )


def _create_secret(kubectl: str, job: KubernetesJob) -> None:
    """Unless it is there: pods of an earlier start may still use it. It is on no command line."""
    namespace = ["--namespace", job.flags.namespace] if job.flags.namespace else []
    get = [kubectl, "get", "secret", job.secret, *namespace, "--ignore-not-found", "-o", "name"]
    answer = subprocess.run(get, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    if answer.stdout.strip():
        return
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": job.secret},
        "immutable": True,
        "stringData": {"secret": new_secret()},
    }
    create = [kubectl, "create", *namespace, "-f", "-"]
    done = subprocess.run(create, input=json.dumps(secret), encoding="utf-8", check=False)
    if done.returncode:
        raise PreflightError(
            f"kubectl could not create the secret {job.secret} (exit code {done.returncode}); its output is above",
            next_step="create it as the first lines of the manifest show, which --out FILE writes",
        )
