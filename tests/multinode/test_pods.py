"""The commands of a manifest's pods, run on test hosts, with the variables that Kubernetes would
set."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.launch.kubernetes import KubernetesJob, manifest_text
from drumline.launch.node_plan import Program
from tests.multinode.hosts import Host, Testbed

yaml = pytest.importorskip("yaml", reason="pip install 'drumline[dev]' brings it")
ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, socket
words = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")]
print(socket.gethostname(), *words, flush=True)
"""


def pod_words(container: dict[str, Any], *, number: int, host: Host) -> list[str]:
    """The pod's command, as the kubelet would start it."""
    given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    # An operator sets such ones as well, for ranks of its own counting.
    values = {
        **given,
        "MASTER_ADDR": "a",
        "POD_IP": host.address,
        "POD_NUMBER": str(number),
        "RANK": "7",
    }
    words = [
        re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word)
        for word in container["command"] + container["args"]
    ]
    assert words[0] == "drumline"
    variables = [f"{name}={value}" for name, value in values.items()]
    return ["env", f"PYTHONPATH={ROOT}", *variables, host.python, "-m", "drumline", *words[1:]]


def test_pods_join_as_one_job(make_testbed: Callable[..., Testbed], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    program = Program(("script.py",))
    manifest = KubernetesJob(
        name="job", image="i", program=program, num_nodes=2, num_procs=2, min_nodes=1
    )
    _, job = yaml.safe_load_all(manifest_text(manifest, "job"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    jobs = [
        host.start(*pod_words(container, number=number, host=host), cwd=tmp_path)
        for number, host in enumerate(make_testbed("a", "b", warm=True))
    ]
    assert [job.wait(100) for job in jobs] == [0, 0], [job.text() for job in jobs]
    lines = sorted(
        line for job in jobs for line in job.text().splitlines() if line[:2] in ("a ", "b ")
    )
    assert lines == [
        f"{host} {rank} 4 {rank % 2} 10.77.0.1" for rank, host in enumerate(("a", "a", "b", "b"))
    ]
