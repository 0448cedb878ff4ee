"""What the rules for scripts tell the user, and how they mend."""

from __future__ import annotations

import pytest

from drumline_lint.findings import Finding
from drumline_lint.fixing import apply_spans, spans_of
from reading_cases import findings_in

SLURM = "#SBATCH --nodes=2 --ntasks-per-node=1 --mem=64G\n"
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
            "DL103",
            "#SBATCH --nodes=2 --ntasks-per-node=8\nsrun torchrun --nnodes=2 --nproc-per-node=8 train.py",
            "srun starts torchrun 8 times on each node, and each of them starts all ranks of the node: too many "
            "processes, which do not find each other or run out of GPU memory",
            "start one task on each node: #SBATCH --ntasks-per-node=1",
        ),
        (
            "DL103",
            f"#SBATCH --nodes=1 --ntasks-per-node=4\nsrun torchrun --nnodes=1 --nproc-per-node=4 {C10D} train.py",
            "srun starts torchrun 4 times on each node, and their rendezvous is for one launcher: that one starts "
            "all ranks with the cores of its task, and the others wait or fail",
            "start one task on each node: #SBATCH --ntasks-per-node=1",
        ),
        (
            "DL107",
            f"#SBATCH --nodes=2\ntorchrun --nnodes=2 --rdzv-id=7 {C10D} train.py",
            "Slurm runs a batch script on its first node only: torchrun is not started on the other node",
            "start it with srun: srun torchrun ...",
        ),
        (
            "DL109",
            "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-id=1 --master-addr=gpu01 train.py",
            "2 nodes and no --rdzv-endpoint: each takes localhost, which is itself; c10d does not read --master-addr",
            "add --rdzv-endpoint with the address of the first node",
        ),
        (
            "DL110",
            "#!/bin/sh\n#SBATCH --nodes=2\nset -e\n#SBATCH --time=1\n#SBATCH --mem=0\n",
            "sbatch does not read this line, nor the 1 like it below: it comes after the first command",
            "move it above the first command",
        ),
        (
            "DL112",
            "torchrun --rdvz_backend=c10d train.py",
            "torchrun has no flag --rdvz_backend",
            "write --rdzv_backend",
        ),
        (
            "DL120",
            "torchrun --standalone train.py \\\n    # --max-steps 1 \\\n    --lr 1",
            "the command ends at the comment between its lines: this line is a command of its own, and fails",
            "remove the comment or the blank, or keep the arguments in an array, which may have comments",
        ),
        (
            "DL121",
            "docker run image torchrun --nproc-per-node=8 train.py",
            "the container has 64 MB of /dev/shm, which NCCL and the workers of every rank's DataLoader share",
            "add --shm-size=16g, or --ipc=host",
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
            "write torch.distributed.run or torchrun, without --use-env",
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
            "CUDA_VISIBLE_DEVICES=0 python -m torch.distributed.run --nproc_per_node=2 train.py\n",
        ),
        (
            "srun python3 -u -m torch.distributed.launch \\\n    --nproc_per_node=2 --use-env \\\n    train.py\n",
            "srun python3 -u -m torch.distributed.run \\\n    --nproc_per_node=2 \\\n    train.py\n",
        ),
        (
            "NAME=é python -m torch.distributed.launch --use_env --name é train.py\r\n",
            "NAME=é python -m torch.distributed.run --name é train.py\r\n",
        ),
        (
            "/opt/bin/python -m torch.distributed.launch --use_env train.py\n",
            "/opt/bin/python -m torch.distributed.run train.py\n",
        ),
        (
            'ssh host "python -m torch.distributed.launch --use_env train.py"\n',
            'ssh host "python -m torch.distributed.run train.py"\n',
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
def test_what_is_not_mechanical_is_not_touched(text: str) -> None:
    assert [one.edits for one in found(text, "DL106")] == [()]
