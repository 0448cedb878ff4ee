"""A Slurm cluster on the hosts of a testbed: the first one schedules, all compute. It ends with its
hosts.

    slurm = Slurm(make_testbed("a", "b"))
    bed["a"].run("sbatch", "--wrap", "hostname", env=slurm.environment)
    slurm.wait_for(job, "COMPLETED")

Nothing of the machine's own Slurm or munge is used or touched: the key, the configuration, the
state and the logs are in the testbed's folder, the sockets in each host's own /run (the path of one
may have 107 characters, no more). Two partitions: a job of `urgent` takes the nodes from one of
`normal`, which gets SIGTERM and a minute to save.
"""

from __future__ import annotations

import secrets

from tests.multinode import processes
from tests.multinode.hosts import Host, Testbed
from tests.multinode.job import Job
from tests.multinode.needs import tool

SOCKET = "/run/munge.socket"
# A requeued job waits for the life of its credential, which is two minutes otherwise, and cannot be
# shorter than this.
CONFIG = """
ClusterName=testbed
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={socket},cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={names} CPUs=1 RealMemory=100 State=UNKNOWN
PartitionName=normal Nodes={names} Default=YES MaxTime=60 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes={names} MaxTime=60 PriorityTier=9 PreemptMode=OFF
"""


class Slurm:
    """Running daemons on all hosts of a testbed. `environment` makes Slurm's commands on a host
    find them."""

    def __init__(self, bed: Testbed) -> None:
        self.bed = bed
        self.folder = bed.folder / "slurm"
        (self.folder / "state").mkdir(parents=True)
        self._first = bed.hosts[0]
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        config = self.folder / "slurm.conf"
        names = ",".join(host.name for host in bed)
        config.write_text(
            CONFIG.format(first=self._first.name, names=names, folder=self.folder, socket=SOCKET)
        )
        # proctrack/linuxproc and no task plugin: there is nothing for cgroups to do.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.environment = {"SLURM_CONF": str(config)}
        self.jobs: list[Job] = []
        for host in bed:
            self._serve(host)
        processes.wait_until(self._are_all_idle, "nodes that are idle", timeout_s=30)

    def _serve(self, host: Host) -> None:
        munge = [
            "--key-file",
            str(self.folder / "munge.key"),
            "--socket",
            SOCKET,
            "--pid-file",
            "/run/munged.pid",
        ]
        munge += [
            "--log-file",
            f"{host.folder}/munged.log",
            "--seed-file",
            f"{host.folder}/munged.seed",
        ]
        self.jobs.append(
            host.start(tool("munged"), "--foreground", "--force", "--num-threads=2", *munge)
        )
        processes.wait_until(
            lambda: host.run("test", "-S", SOCKET).returncode == 0,
            f"munged on {host.name}",
            timeout_s=10,
        )
        if host is self._first:
            self.jobs.append(host.start(tool("slurmctld"), "-D", env=self.environment))
        self.jobs.append(host.start(tool("slurmd"), "-D", "-N", host.name, env=self.environment))

    def _are_all_idle(self) -> bool:
        assert all(job.is_running() for job in self.jobs), [job.text() for job in self.jobs]
        shown = self._first.run(
            "sinfo", "-h", "-p", "normal", "-N", "-o", "%T", env=self.environment
        )
        return shown.stdout.split() == ["idle"] * len(self.bed.hosts)

    def facts_of(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, ExitCode..."""
        shown = self._first.run("scontrol", "show", "job", "--oneliner", job, env=self.environment)
        assert shown.returncode == 0, shown.stderr
        return dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)

    def wait_for(self, job: str, state: str, *, timeout_s: float = 120.0) -> dict[str, str]:
        """Until the job is in that state; what Slurm knows of it then."""
        processes.wait_until(
            lambda: self.facts_of(job)["JobState"] == state,
            f"job {job} {state}",
            timeout_s=timeout_s,
        )
        return self.facts_of(job)
