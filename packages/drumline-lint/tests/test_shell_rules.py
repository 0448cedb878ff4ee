"""What the rules for scripts tell the user, and how they mend."""

from __future__ import annotations

import pytest

from drumline_lint.edits import apply_spans, spans_of
from drumline_lint.finding import Finding
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
            "DL101",
            f"torchrun --nnodes=2 {C10D} train.py",
            "torchrun joins several nodes by c10d without --rdzv-id: all jobs that come to this endpoint are called "
            "`none`, and a second one mixes with the first",
            'add --rdzv-id="$JOB_ID", or another id that each job has for itself',
        ),
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
            "DL103",
            "#SBATCH --nodes=2 --ntasks-per-node=8\nsrun torchrun --nnodes=2 --nproc-per-node=8 train.py",
            "srun starts torchrun 8 times on each node, and each starts all ranks of its node: too many processes, "
            "which do not meet or run out of GPU memory",
            "write #SBATCH --ntasks-per-node=1, or srun --ntasks=$SLURM_NNODES --ntasks-per-node=1",
        ),
        (
            "DL103",
            "srun -N1 -n8 accelerate launch train.py",
            "srun starts accelerate launch 8 times on 1 node, and each starts all ranks of its node: too many "
            "processes, which do not meet or run out of GPU memory",
            "write srun --ntasks=1 --ntasks-per-node=1",
        ),
        (
            "DL103",
            "#SBATCH --nodes=2 --ntasks=16\nsrun --ntasks-per-node=1 torchrun --nnodes=2 --nproc-per-node=8 train.py",
            "srun starts torchrun 16 times on 2 nodes, for Slurm ignores its --ntasks-per-node=1 beside the number in "
            "the #SBATCH lines, and each starts all ranks of its node: too many processes, which do not meet or run "
            "out of GPU memory",
            "write #SBATCH --ntasks=2, or srun --ntasks=$SLURM_NNODES --ntasks-per-node=1",
        ),
        (
            "DL103",
            "srun -N2 --ntasks-per-node=8 torchrun --nnodes=2 --nproc-per-node=8 train.py",
            "srun starts torchrun 8 times on each node, and each starts all ranks of its node: too many processes, "
            "which do not meet or run out of GPU memory",
            "write --ntasks-per-node=1",
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
        (
            "DL105",
            "export NCCL_RINGS=1",
            "NCCL has given up NCCL_RINGS, and does not read it",
            "remove NCCL_RINGS",
        ),
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
        (
            "DL107",
            f"{SLURM}srun torchrun --nnodes=4 train.py",
            "torchrun waits for 4 nodes, but srun starts it on 2",
            "write --nnodes=$SLURM_NNODES",
        ),
        (
            "DL107",
            f"{SLURM}torchrun --nnodes=2 train.py",
            "a batch file runs on its first node only: this torchrun is alone and waits for 2 nodes",
            "start it on every node: srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 torchrun",
        ),
        (
            "DL107",
            "#SBATCH --gpus-per-node=1\ntorchrun --nproc-per-node=2 train.py",
            "torchrun starts 2 ranks on a node, but Slurm gives it 1 GPU",
            "write --nproc-per-node=1, or ask for --gpus-per-node=2",
        ),
        (
            "DL108",
            f"{SLURM}srun torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=$HEAD train.py",
            "every node is given 0 for $SLURM_NODEID, which is put in before srun starts anything: each takes itself "
            "for the first",
            "let each node's own shell put it in: srun bash -c 'torchrun --node-rank=$SLURM_NODEID train.py'",
        ),
        (
            "DL108",
            f"{SLURM}srun torchrun --nnodes=2 --node-rank=0 --master-addr=$HEAD train.py",
            "every node is given --node-rank 0: each takes itself for the first",
            "let each node's own shell put it in: srun bash -c 'torchrun --node-rank=$SLURM_NODEID train.py'",
        ),
        (
            "DL109",
            "torchrun --nnodes=2 --node-rank=$1 --master-addr=localhost train.py",
            "2 nodes are to meet at localhost, which is another on each",
            "give the address of the first node, as all of them know it",
        ),
        (
            "DL109",
            "torchrun --nnodes=2 --master-addr=$HEAD --rdzv-backend=c10d --rdzv-id=7 train.py",
            "2 nodes and no --rdzv-endpoint: torchrun takes localhost, which is another on each, and c10d does not "
            "read --master-addr",
            "add --rdzv-endpoint with the address of the first node",
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
        (
            'ssh host "python -m torch.distributed.launch --use_env train.py"\n',
            'ssh host "torchrun train.py"\n',
        ),
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
