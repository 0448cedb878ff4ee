"""The variables that NCCL, gloo, torch, CUDA and libfabric read: what each does, and which are old, slow or risky.

From the manuals of NCCL and torch, in our words. The value of a variable is only shown when the variable is in this
table: what we do not know may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
FAMILIES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "FI_", "OMP_", "TP_SOCKET_")
NOT_SHOWN = "(set; not shown)"
LONGEST = 200
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)

MEANING = {
    "NCCL_SOCKET_IFNAME": "which networks NCCL uses: prefixes, =names, or ^prefixes to leave out",
    "NCCL_SOCKET_FAMILY": "IPv4 (AF_INET) or IPv6 (AF_INET6)",
    "NCCL_SOCKET_NTHREADS": "helper threads per connection over TCP",
    "NCCL_NSOCKS_PERTHREAD": "sockets per helper thread",
    "NCCL_COMM_ID": "a meeting point of NCCL's own; torch brings one",
    "NCCL_CONF_FILE": "a file with more of these variables",
    "NCCL_HOSTID": "what tells hosts apart; equal values are taken for one host",
    "NCCL_NET": "which network module is used (IB, Socket, or that of a plugin)",
    "NCCL_NET_PLUGIN": "the network plugin to load, such as that of AWS EFA",
    "NCCL_TUNER_PLUGIN": "the plugin that chooses algorithms",
    "NCCL_TUNER_CONFIG_PATH": "a file for that plugin",
    "NCCL_PROFILER_PLUGIN": "a plugin that watches NCCL",
    "NCCL_NET_GDR_LEVEL": "how far apart a GPU and a network card may be for direct access",
    "NCCL_NET_GDR_READ": "direct access to GPU memory also for sending",
    "NCCL_NET_SHARED_BUFFERS": "one set of network buffers for all connections",
    "NCCL_CROSS_NIC": "whether a ring may use another card on the next node",
    "NCCL_IB_DISABLE": "1: no InfiniBand or RoCE, TCP instead",
    "NCCL_IB_HCA": "which InfiniBand cards are used",
    "NCCL_IB_TIMEOUT": "how long InfiniBand waits before it sends again",
    "NCCL_IB_RETRY_CNT": "how often InfiniBand sends again",
    "NCCL_IB_GID_INDEX": "the address table entry for RoCE",
    "NCCL_IB_SL": "InfiniBand's service level",
    "NCCL_IB_TC": "InfiniBand's traffic class",
    "NCCL_IB_AR_THRESHOLD": "from which size on messages are routed adaptively",
    "NCCL_IB_QPS_PER_CONNECTION": "queues per InfiniBand connection",
    "NCCL_IB_PCI_RELAXED_ORDERING": "whether cards may reorder writes; helps in virtual machines",
    "NCCL_IB_ADAPTIVE_ROUTING": "whether InfiniBand may choose its ways",
    "NCCL_P2P_DISABLE": "1: GPUs of a host do not copy to each other directly",
    "NCCL_P2P_LEVEL": "how far apart GPUs may be for direct copies",
    "NCCL_P2P_DIRECT_DISABLE": "1: no direct copies within one process",
    "NCCL_SHM_DISABLE": "1: no shared memory between GPUs of a host",
    "NCCL_NVLS_ENABLE": "sums inside the NVLink switch",
    "NCCL_CUMEM_ENABLE": "how NCCL gets its memory",
    "NCCL_CUMEM_HOST_ENABLE": "how NCCL gets shared memory of the host",
    "NCCL_MNNVL_ENABLE": "NVLink over several nodes",
    "NCCL_COLLNET_ENABLE": "sums inside the network (SHARP)",
    "NCCL_PXN_DISABLE": "1: a GPU uses no card by way of another GPU",
    "NCCL_ALGO": "pins the algorithm (Ring, Tree, ...)",
    "NCCL_PROTO": "pins the protocol (LL, LL128, Simple)",
    "NCCL_BUFFSIZE": "bytes of each buffer between two GPUs",
    "NCCL_NTHREADS": "CUDA threads per block",
    "NCCL_MIN_NCHANNELS": "the fewest channels, each a block on the GPU",
    "NCCL_MAX_NCHANNELS": "the most channels",
    "NCCL_MIN_CTAS": "the fewest blocks on the GPU",
    "NCCL_MAX_CTAS": "the most blocks on the GPU",
    "NCCL_LAUNCH_MODE": "how kernels of several GPUs of one process are started",
    "NCCL_CHECK_POINTERS": "1: every pointer is checked at every call",
    "NCCL_IGNORE_CPU_AFFINITY": "1: NCCL chooses processors anew",
    "NCCL_TOPO_FILE": "a description of the machine that replaces what NCCL finds",
    "NCCL_TOPO_DUMP_FILE": "where NCCL writes what it found",
    "NCCL_GRAPH_FILE": "fixed rings and trees",
    "NCCL_GRAPH_DUMP_FILE": "where NCCL writes its rings and trees",
    "NCCL_VERSION": "of the container's image; NCCL itself does not read it",
    "NCCL_DEBUG": "how much NCCL tells (VERSION, WARN, INFO, TRACE)",
    "NCCL_DEBUG_FILE": "where it tells it; %h and %p are host and process",
    "NCCL_DEBUG_SUBSYS": "about which parts",
    "NCCL_DMABUF_ENABLE": "another way of direct access by cards",
    "NCCL_GRAPH_REGISTER": "registers buffers of CUDA graphs",
    "NCCL_COMM_BLOCKING": "whether calls wait until they are done",
    "NCCL_RAS_ENABLE": "a thread that keeps an eye on all ranks",
    "NCCL_RUNTIME_CONNECT": "connections are made when first used",
    "GLOO_SOCKET_IFNAME": "which network gloo uses, by its whole name",
    "GLOO_DEVICE_TRANSPORT": "TCP, with or without TLS",
    "TP_SOCKET_IFNAME": "which network torch's RPC uses",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what happens to a process when a collective fails or times out",
    "TORCH_NCCL_BLOCKING_WAIT": "1: wait() blocks the host and raises on a timeout",
    "TORCH_NCCL_HIGH_PRIORITY": "collectives on streams of high priority",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "writes the flight recorder when a collective times out",
    "TORCH_NCCL_DESYNC_DEBUG": "tells which rank was late; costs time",
    "TORCH_NCCL_ENABLE_TIMING": "measures every collective",
    "TORCH_NCCL_ENABLE_MONITORING": "a thread that ends a process whose watchdog hangs",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "after how long it does",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "how many collectives the flight recorder keeps",
    "TORCH_FR_BUFFER_SIZE": "how many collectives the flight recorder keeps",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "how long a timeout waits for the flight recorder",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "where the flight recorder writes",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "communicators are made without blocking",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "how tensors of collectives are kept alive",
    "TORCH_NCCL_CUDA_EVENT_CACHE": "CUDA events are used again",
    "TORCH_NCCL_NAN_CHECK": "looks for NaN in what is sent",
    "TORCH_DISTRIBUTED_DEBUG": "OFF, INFO or DETAIL: checks collectives between ranks",
    "TORCH_CPP_LOG_LEVEL": "how much torch's C++ tells",
    "TORCH_SHOW_CPP_STACKTRACES": "C++ frames in error messages",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1: each restart under torchrun gets a store of its own",
    "TORCH_LOGS": "which parts of torch tell more",
    "TORCH_HOME": "where torch keeps downloads",
    "TORCH_CUDA_ARCH_LIST": "for which GPUs extensions are compiled",
    "TORCH_EXTENSIONS_DIR": "where compiled extensions are kept",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1: TF32, whatever the code says",
    "PYTORCH_ALLOC_CONF": "how torch keeps GPU memory",
    "PYTORCH_CUDA_ALLOC_CONF": "how torch keeps GPU memory",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1: GPU memory is not kept",
    "CUDA_VISIBLE_DEVICES": "which GPUs a process sees, in this order",
    "CUDA_DEVICE_ORDER": "in which order CUDA counts GPUs",
    "CUDA_LAUNCH_BLOCKING": "1: every kernel is waited for",
    "CUDA_DEVICE_MAX_CONNECTIONS": "how many queues lead to the GPU",
    "CUDA_MODULE_LOADING": "kernels are loaded when first used, or all at once",
    "CUDA_CACHE_PATH": "where compiled kernels are kept",
    "CUDA_HOME": "where the CUDA toolkit is",
    "CUDA_PATH": "where the CUDA toolkit is",
    "CUDA_VERSION": "a label of the container image",
    "CUDA_MPS_PIPE_DIRECTORY": "several processes share a GPU by way of MPS",
    "FI_PROVIDER": "which network libfabric uses (efa on AWS)",
    "FI_EFA_USE_DEVICE_RDMA": "direct access to GPU memory by EFA",
    "FI_EFA_FORK_SAFE": "makes EFA survive a fork",
    "FI_EFA_SET_CUDA_SYNC_MEMOPS": "0 avoids a hang with old NCCL plugins on EFA",
    "FI_LOG_LEVEL": "how much libfabric tells",
    "OMP_NUM_THREADS": "CPU threads of each process",
    "OMP_PROC_BIND": "whether threads stay on their processors",
    "OMP_PLACES": "on which processors threads run",
}
# Names that were given up, and what is read instead; nothing, where nothing is.
RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "NCCL_SINGLE_RING_THRESHOLD": "",
    "NCCL_LL_THRESHOLD": "",
    "NCCL_RINGS": "",
    "NCCL_CHECKS_DISABLE": "",
}
# Of those, the ones that are still read under the old name.
STILL_READ = (
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING",
    "NCCL_MAX_NRINGS",
    "NCCL_MIN_NRINGS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
)


@dataclass(frozen=True)
class Rule:
    """When a variable has one of these values (any, if none is named), this is to be said."""

    name: str
    values: tuple[str, ...]
    level: Literal["problem", "warning", "note"]
    what: str
    fix: str = ""


SLOW = "for finding a fault; in a real run it costs speed"
RULES = (
    Rule(
        "NCCL_P2P_DISABLE", ("1",), "warning", "GPUs of this host copy by way of the CPU, many times slower"
    ),
    Rule(
        "NCCL_SHM_DISABLE",
        ("1",),
        "warning",
        "GPUs without a direct link talk over the network, even on one host",
    ),
    Rule("NCCL_IB_DISABLE", ("1",), "warning", "InfiniBand is not used, even where there is one"),
    Rule(
        "NCCL_ALGO",
        (),
        "warning",
        "a pinned algorithm is slow or fails at sizes and worlds it was not pinned for",
    ),
    Rule(
        "NCCL_PROTO",
        (),
        "warning",
        "a pinned protocol can be slow, and LL128 corrupts data where it is not supported",
    ),
    Rule(
        "NCCL_DEBUG",
        ("TRACE",),
        "warning",
        "writes a line per call, if it is compiled in at all",
        "export NCCL_DEBUG=WARN",
    ),
    Rule(
        "NCCL_DEBUG",
        ("INFO",),
        "note",
        "writes hundreds of lines per rank at the start",
        "export NCCL_DEBUG=WARN",
    ),
    Rule("NCCL_CHECK_POINTERS", ("1",), "warning", SLOW),
    Rule("NCCL_LAUNCH_MODE", ("GROUP",), "warning", "needs all GPUs in one process, which DDP does not do"),
    Rule(
        "NCCL_COMM_ID",
        (),
        "warning",
        "makes NCCL meet there instead of where torch says; ranks of two jobs mix",
    ),
    Rule("NCCL_HOSTID", (), "warning", "two hosts with one value are taken for one, and fail"),
    Rule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        ("0",),
        "problem",
        "a rank that waits for one that failed waits for ever",
    ),
    Rule(
        "TORCH_NCCL_BLOCKING_WAIT", ("1",), "warning", "the host waits for every collective: nothing overlaps"
    ),
    Rule("TORCH_NCCL_ENABLE_MONITORING", ("0",), "warning", "a rank whose watchdog hangs is never ended"),
    Rule("TORCH_NCCL_DESYNC_DEBUG", ("1",), "warning", SLOW),
    Rule("TORCH_NCCL_NAN_CHECK", ("1",), "warning", SLOW),
    Rule("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "warning", "checks every collective between ranks: " + SLOW),
    Rule(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", ("1",), "warning", "changes results, whatever the code asks for"
    ),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", ("1",), "warning", "every tensor waits for the driver: " + SLOW),
    Rule("CUDA_LAUNCH_BLOCKING", ("1",), "warning", "the GPU waits for Python after every kernel: " + SLOW),
    Rule("OMP_NUM_THREADS", ("1",), "note", "torchrun's own default; more may help work on the CPU"),
)
# What several connections of NCCL may have together.
MAX_SOCKETS = 64


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of these families that are set, by name; the value only where it is known to be harmless."""
    return {
        name: _shown(name, value) for name, value in sorted(environment.items()) if name.startswith(FAMILIES)
    }


def _shown(name: str, value: str) -> str:
    is_known = name in MEANING or name in RENAMED
    if not is_known or SECRET.search(name):
        return NOT_SHOWN
    return "".join(letter if letter.isprintable() else "?" for letter in value)[:LONGEST]
