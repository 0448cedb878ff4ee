"""DL037: an argument that the function does not have."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.errors import did_you_mean
from drumline_lint.findings import Finding, rule
from drumline_lint.program import names
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source

RULE = rule("DL037")
_COLLECTIVE = "group async_op"
# Those of torch 2.0 to 2.13, also where a version has since lost or only lately got one.
ACCEPTED = {
    names.DDP: (
        "module device_ids output_device dim broadcast_buffers init_sync process_group bucket_cap_mb "
        "find_unused_parameters check_reduction gradient_as_bucket_view static_graph delay_all_reduce_named_params "
        "param_to_hook_all_reduce mixed_precision device_mesh skip_all_reduce_unused_params bucket_cap_mb_list "
        "batched_grad_copy forward_sync_buffers"
    ),
    names.LOADER: (
        "dataset batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory drop_last timeout "
        "worker_init_fn multiprocessing_context generator prefetch_factor persistent_workers pin_memory_device "
        "in_order"
    ),
    names.DISTRIBUTED_SAMPLER: "dataset num_replicas rank shuffle seed drop_last",
    "torch.amp.GradScaler": "device init_scale growth_factor backoff_factor growth_interval enabled",
    "torch.cuda.amp.GradScaler": "init_scale growth_factor backoff_factor growth_interval enabled",
    names.INIT: (
        "backend init_method timeout world_size rank store group_name pg_options device_id _ranks"
    ),
    names.DESTROY: "group",
    "torch.distributed.new_group": (
        "ranks timeout backend pg_options use_local_synchronization group_desc device_id sort_ranks"
    ),
    "torch.distributed.barrier": f"{_COLLECTIVE} device_ids timeout",
    "torch.distributed.monitored_barrier": "group timeout wait_all_ranks",
    "torch.distributed.all_reduce": f"tensor op {_COLLECTIVE}",
    "torch.distributed.reduce": f"tensor dst op {_COLLECTIVE} group_dst",
    "torch.distributed.broadcast": f"tensor src {_COLLECTIVE} group_src",
    "torch.distributed.all_gather": f"tensor_list tensor {_COLLECTIVE}",
    "torch.distributed.all_gather_into_tensor": f"output_tensor input_tensor {_COLLECTIVE}",
    "torch.distributed.gather": f"tensor gather_list dst {_COLLECTIVE} group_dst",
    "torch.distributed.scatter": f"tensor scatter_list src {_COLLECTIVE} group_src",
    "torch.distributed.reduce_scatter": f"output input_list op {_COLLECTIVE}",
    "torch.distributed.reduce_scatter_tensor": f"output input op {_COLLECTIVE}",
    "torch.distributed.all_to_all": f"output_tensor_list input_tensor_list {_COLLECTIVE}",
    "torch.distributed.all_to_all_single": (
        f"output input output_split_sizes input_split_sizes {_COLLECTIVE}"
    ),
    "torch.distributed.all_gather_object": "object_list obj group",
    "torch.distributed.gather_object": "obj object_gather_list dst group group_dst",
    "torch.distributed.broadcast_object_list": "object_list src group device group_src",
    "torch.distributed.scatter_object_list": (
        "scatter_object_output_list scatter_object_input_list src group group_src"
    ),
    "torch.distributed.send": "tensor dst group tag group_dst",
    "torch.distributed.recv": "tensor src group tag group_src",
    "torch.distributed.isend": "tensor dst group tag group_dst",
    "torch.distributed.irecv": "tensor src group tag group_src",
    "torch.distributed.get_rank": "group",
    "torch.distributed.get_world_size": "group",
}
# Where what was meant has another name, or another place.
MEANT = {
    (names.DDP, "timeout"): "give the timeout to init_process_group",
    (
        names.DDP,
        "device",
    ): "move the model with .to(device) first, and give device_ids=[local_rank]",
    (names.DDP, "devices"): "give device_ids=[local_rank]",
    (names.DDP, "bucket_size_mb"): "write bucket_cap_mb",
    (
        names.INIT,
        "addr",
    ): "give init_method='tcp://HOST:PORT', or set MASTER_ADDR and use init_method='env://'",
    (
        names.INIT,
        "port",
    ): "give init_method='tcp://HOST:PORT', or set MASTER_PORT and use init_method='env://'",
    (
        "torch.distributed.all_reduce",
        "timeout",
    ): "give the timeout to init_process_group or new_group",
    (names.DISTRIBUTED_SAMPLER, "world_size"): "write num_replicas",
    (names.DISTRIBUTED_SAMPLER, "batch_size"): "give batch_size to the DataLoader",
    (names.LOADER, "seed"): "give a generator, or the seed to the sampler",
}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Every keyword of known calls; code that tests for an argument by its quoted name has a torch
    with it."""
    quoted = {
        constant.value
        for constant in program.index(source).every(ast.Constant)
        if isinstance(constant.value, str)
    }
    for call in program.calls(source, *ACCEPTED):
        name = program.name_of(call.func)
        accepted = ACCEPTED[name].split()
        for keyword in call.keywords:
            if (
                keyword.arg is not None
                and keyword.arg not in accepted
                and keyword.arg not in quoted
            ):
                yield _finding(source, call, keyword, name, accepted)


def _finding(
    source: Source, call: ast.Call, keyword: ast.keyword, name: str, accepted: list[str]
) -> Finding:
    assert keyword.arg is not None
    meant = MEANT.get((name, keyword.arg), "") or did_you_mean(
        keyword.arg, accepted, known_as="it has"
    )
    message = (
        f"{source.code(call.func)} has no argument {keyword.arg!r}: the call raises a TypeError"
    )
    return RULE.at(source, keyword, message, fix=meant)
