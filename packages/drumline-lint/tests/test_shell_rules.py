"""What the rules for scripts tell the user, and how they mend."""

from __future__ import annotations

import pytest

from drumline_lint.findings import Finding
from drumline_lint.fixing import apply_spans, spans_of
from drumline_lint.reading.nccl_names import GIVEN_UP, NCCL, OLD_NAMES, TORCH
from reading_cases import findings_in

SLURM = "#SBATCH --nodes=2 --ntasks-per-node=1\n"
C10D = "--rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500"


def found(text: str, rule: str) -> list[Finding]:
    return [one for one in findings_in((("job.sh", text),)) if one.rule == rule]


@pytest.mark.parametrize(
    ("rule", "text", "message", "fix"),
    [
        (
            "DL102",
            f"{SLURM}srun torchrun --nnodes=2 --rdzv-id=7 {C10D} train.py",
            "port 29500 is the same for every job of this script, and Slurm may put two on one host: the second fails, "
            "or joins the first",
            "take it from the job's number: $((20000 + SLURM_JOB_ID % 20000)); or ask for whole nodes with #SBATCH "
            "--exclusive",
        ),
        (
            "DL102",
            f"{SLURM}srun torchrun --nnodes=2 --master-addr=$HEAD train.py",
            "no port is given, so torchrun takes 29500 for every job, and Slurm may put two on one host: the second "
            "fails, or joins the first",
            "give a port from the job's number: $((20000 + SLURM_JOB_ID % 20000)); or ask for whole nodes with #SBATCH "
            "--exclusive",
        ),
        (
            "DL102",
            "torchrun --nproc-per-node=2 --master-port=29501 train.py",
            "torchrun runs on one node and is given port 29501: a second run on this machine fails, or joins the "
            "first, though neither needs a known port",
            "leave the port out and use torchrun --standalone, which takes a free one",
        ),
        (
            "DL104",
            "export NCCL_SHM_DISABLE=1",
            "NCCL_SHM_DISABLE=1 is not for real runs: GPUs without a direct link talk over the network, even on one "
            "host, instead of shared memory",
            "remove NCCL_SHM_DISABLE, or set it only while you look for the fault",
        ),
        (
            "DL104",
            "export NCCL_DEBUG=TRACE",
            "NCCL_DEBUG=TRACE is not for real runs: every call is written to the log of every rank",
            "set NCCL_DEBUG=WARN",
        ),
        (
            "DL104",
            "export NCCL_PROTO=LL,LL128",
            "NCCL_PROTO=LL,LL128 is not for real runs: LL128 is forced, which can corrupt data on machines that do "
            "not support it",
            "remove NCCL_PROTO, or set it only while you look for the fault",
        ),
        (
            "DL105",
            "NCCL_NET=Socket\ntorchrun train.py",
            "NCCL_NET is set in the shell but not exported: what is started below does not see it",
            "write export NCCL_NET=Socket",
        ),
        (
            "DL105",
            "torchrun train.py\nexport NCCL_NET=Socket",
            "NCCL_NET is set after torchrun was started, which does not see it any more",
            "set NCCL_NET above the line that starts torchrun",
        ),
        (
            "DL105",
            "export NCCL_SOKCET_IFNAME=eth0",
            "neither NCCL nor torch reads NCCL_SOKCET_IFNAME; did you mean NCCL_SOCKET_IFNAME?",
            "set NCCL_SOCKET_IFNAME",
        ),
        (
            "DL105",
            "export NCCL_HIGH_PRIORITY=1",
            "neither NCCL nor torch reads NCCL_HIGH_PRIORITY; did you mean TORCH_NCCL_HIGH_PRIORITY?",
            "set TORCH_NCCL_HIGH_PRIORITY",
        ),
        (
            "DL105",
            "export NCCL_IB_GDR_LEVEL=2",
            "NCCL has given up NCCL_IB_GDR_LEVEL, and does not read it",
            "set NCCL_NET_GDR_LEVEL",
        ),
        ("DL105", "export NCCL_RINGS=1", "NCCL has given up NCCL_RINGS, and does not read it", "remove NCCL_RINGS"),
        (
            "DL105",
            "export NCCL_SOCKET_IFNAME=10.0.0.1",
            "NCCL_SOCKET_IFNAME=10.0.0.1 is an address, and NCCL looks for the name of an interface; it finds none, "
            "and fails",
            "write how the name begins, such as eth, or =eth0 for one",
        ),
        (
            "DL105",
            "export NCCL_SOCKET_IFNAME='ib*'",
            "NCCL_SOCKET_IFNAME=ib* has a star, which NCCL takes for a letter: names are matched by how they begin; "
            "it finds none, and fails",
            "write how the name begins, such as eth, or =eth0 for one",
        ),
        (
            "DL105",
            "export NCCL_SOCKET_IFNAME='^docker*'",
            "NCCL_SOCKET_IFNAME=^docker* has a star, which NCCL takes for a letter: names are matched by how they "
            "begin; it leaves out none",
            "write how the name begins, such as eth, or =eth0 for one",
        ),
        (
            "DL105",
            "export NCCL_P2P_DISABLE=True",
            "NCCL reads a number from NCCL_P2P_DISABLE, and takes true for 0: nothing is switched off",
            "set it to 1, or remove NCCL_P2P_DISABLE",
        ),
        (
            "DL105",
            "export NCCL_DEBUG=warn NCCL_DEBUG_SUBSYS=NET",
            "NCCL_DEBUG_SUBSYS chooses from what NCCL_DEBUG=INFO writes, and NCCL_DEBUG is WARN",
            "set NCCL_DEBUG=INFO, or remove NCCL_DEBUG_SUBSYS",
        ),
        (
            "DL106",
            "python -m torch.distributed.launch train.py",
            "torch.distributed.launch is deprecated in favour of torchrun; it adds --local-rank to the arguments of "
            "the script, which torchrun does not",
            "use torchrun, and read os.environ['LOCAL_RANK'] in the script",
        ),
        (
            "DL106",
            "python -m torch.distributed.launch --use_env train.py",
            "torch.distributed.launch is deprecated in favour of torchrun",
            "write torchrun instead of it, without --use-env",
        ),
    ],
)
def test_what_the_user_reads(rule: str, text: str, message: str, fix: str) -> None:
    assert [(one.message, one.fix) for one in found(text, rule)] == [(message, fix)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "CUDA_VISIBLE_DEVICES=0 python -m torch.distributed.launch --use_env --nproc_per_node=2 train.py\n",
            "CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node=2 train.py\n",
        ),
        (
            "srun python3 -u -m torch.distributed.launch \\\n    --nproc_per_node=2 --use-env \\\n    train.py\n",
            "srun torchrun \\\n    --nproc_per_node=2 \\\n    train.py\n",
        ),
        (
            "NAME=é python -m torch.distributed.launch --use_env --name é train.py\r\n",
            "NAME=é torchrun --name é train.py\r\n",
        ),
        (
            "/opt/bin/python -m torch.distributed.launch --use_env train.py\n",
            "/opt/bin/python -m torch.distributed.run train.py\n",
        ),
        ('ssh host "python -m torch.distributed.launch --use_env train.py"\n', 'ssh host "torchrun train.py"\n'),
    ],
)
def test_the_old_launcher_is_replaced(text: str, expected: str) -> None:
    (finding,) = found(text, "DL106")
    assert apply_spans(text, spans_of(text, finding.edits)) == expected
    assert not found(expected, "DL106")


@pytest.mark.parametrize(
    "text",
    [
        "python -m torch.distributed.launch --nproc_per_node=2 train.py\n",
        "python -m torch.distributed.launch train.py --use_env\n",
        'flags="--use_env --nproc_per_node=2"\npython -m torch.distributed.launch $flags train.py\n',
    ],
)
def test_what_is_not_mechanical_is_left_alone(text: str) -> None:
    assert [one.edits for one in found(text, "DL106")] == [()]


def test_names_of_variables_are_known_once() -> None:
    assert not (NCCL | TORCH) & GIVEN_UP.keys()
    assert {f"TORCH_{name}" for name in OLD_NAMES} <= TORCH


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("export NCCL_IB_DISABLE=1", "note"),
        ("export NCCL_PROTO=Simple", "note"),
        ("export NCCL_PROTO=LL128", "warning"),
        ("export NCCL_P2P_DISABLE=1", "warning"),
    ],
)
def test_what_a_network_may_need_is_a_note(text: str, severity: str) -> None:
    assert [one.severity for one in found(text, "DL104")] == [severity]
