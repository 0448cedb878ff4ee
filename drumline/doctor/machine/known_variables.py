"""The variables that NCCL, gloo, torch, CUDA and libfabric read: what each does, and which are old, slow or risky.

From the manuals of NCCL and torch, in our words. A value is only shown when its variable is in this table: what we do
not know may be a secret.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from drumline.doctor.finding import Finding, Level

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "FI_", "OMP_", "TP_SOCKET_")
NOT_SHOWN = "(set; not shown)"
MAX_SHOWN = 200
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)

MEANING = {
    "NCCL_SOCKET_IFNAME": "which interfaces NCCL uses: prefixes, =names, or ^prefixes to exclude",
    "NCCL_SOCKET_FAMILY": "IPv4 (AF_INET) or IPv6 (AF_INET6)",
    "NCCL_SOCKET_NTHREADS": "helper threads per connection over TCP",
    "NCCL_NSOCKS_PERTHREAD": "sockets per helper thread",
    "NCCL_COMM_ID": "a rendezvous address of NCCL's own; torch provides one",
    "NCCL_CONF_FILE": "a file with more of these variables",
    "NCCL_HOSTID": "identifies the host; equal values are treated as one host",
    "NCCL_NET": "which network module is used (IB, Socket, or a plugin's)",
    "NCCL_NET_PLUGIN": "the network plugin to load, such as AWS EFA's",
    "NCCL_TUNER_PLUGIN": "the plugin that chooses algorithms",
    "NCCL_TUNER_CONFIG_PATH": "a file for that plugin",
    "NCCL_PROFILER_PLUGIN": "a plugin that profiles NCCL",
    "NCCL_NET_GDR_LEVEL": "how far apart a GPU and a network card may be for direct access",
    "NCCL_NET_GDR_READ": "direct access to GPU memory also for sending",
    "NCCL_NET_SHARED_BUFFERS": "one set of network buffers for all connections",
    "NCCL_CROSS_NIC": "whether a ring may use a different card on the next node",
    "NCCL_IB_DISABLE": "1: no InfiniBand or RoCE, TCP instead",
    "NCCL_IB_HCA": "which InfiniBand cards are used",
    "NCCL_IB_TIMEOUT": "how long InfiniBand waits before it retransmits",
    "NCCL_IB_RETRY_CNT": "how often InfiniBand retransmits",
    "NCCL_IB_GID_INDEX": "the address table entry for RoCE",
    "NCCL_IB_SL": "InfiniBand's service level",
    "NCCL_IB_TC": "InfiniBand's traffic class",
    "NCCL_IB_AR_THRESHOLD": "the size from which messages are routed adaptively",
    "NCCL_IB_QPS_PER_CONNECTION": "queues per InfiniBand connection",
    "NCCL_IB_PCI_RELAXED_ORDERING": "whether cards may reorder writes; helps in virtual machines",
    "NCCL_IB_ADAPTIVE_ROUTING": "whether InfiniBand may choose its routes",
    "NCCL_P2P_DISABLE": "1: GPUs of a host do not copy to each other directly",
    "NCCL_P2P_LEVEL": "how far apart GPUs may be for direct copies",
    "NCCL_P2P_DIRECT_DISABLE": "1: no direct copies within one process",
    "NCCL_SHM_DISABLE": "1: no shared memory between GPUs of a host",
    "NCCL_NVLS_ENABLE": "sums inside the NVLink switch",
    "NCCL_CUMEM_ENABLE": "how NCCL allocates memory",
    "NCCL_CUMEM_HOST_ENABLE": "how NCCL allocates shared host memory",
    "NCCL_MNNVL_ENABLE": "NVLink over several nodes",
    "NCCL_COLLNET_ENABLE": "sums inside the network (SHARP)",
    "NCCL_PXN_DISABLE": "1: a GPU uses no network card through another GPU",
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
    "NCCL_IGNORE_CPU_AFFINITY": "1: NCCL ignores the CPU affinity it was started with",
    "NCCL_TOPO_FILE": "a description of the machine that replaces what NCCL finds",
    "NCCL_TOPO_DUMP_FILE": "where NCCL writes what it found",
    "NCCL_GRAPH_FILE": "fixed rings and trees",
    "NCCL_GRAPH_DUMP_FILE": "where NCCL writes its rings and trees",
    "NCCL_VERSION": "a label of the container image; NCCL does not read it",
    "NCCL_DEBUG": "how much NCCL logs (VERSION, WARN, INFO, TRACE)",
    "NCCL_DEBUG_FILE": "where NCCL logs; %h and %p are host and process",
    "NCCL_DEBUG_SUBSYS": "which parts of NCCL log",
    "NCCL_DMABUF_ENABLE": "direct access by network cards through DMA-BUF",
    "NCCL_GRAPH_REGISTER": "registers buffers of CUDA graphs",
    "NCCL_COMM_BLOCKING": "whether calls wait until they are done",
    "NCCL_RAS_ENABLE": "a thread that monitors all ranks",
    "NCCL_RUNTIME_CONNECT": "connections are made when first used",
    "GLOO_SOCKET_IFNAME": "which interface gloo uses, by its full name",
    "GLOO_DEVICE_TRANSPORT": "TCP, with or without TLS",
    "TP_SOCKET_IFNAME": "which interface torch's RPC uses",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what happens to a process when a collective fails or times out",
    "TORCH_NCCL_BLOCKING_WAIT": "1: wait() blocks the host and raises on a timeout",
    "TORCH_NCCL_HIGH_PRIORITY": "collectives on streams of high priority",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "writes the flight recorder when a collective times out",
    "TORCH_NCCL_DESYNC_DEBUG": "reports which rank was late; costs time",
    "TORCH_NCCL_ENABLE_TIMING": "measures every collective",
    "TORCH_NCCL_ENABLE_MONITORING": "a thread that ends a process whose watchdog hangs",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "after how many seconds it does",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "how many collectives the flight recorder keeps",
    "TORCH_FR_BUFFER_SIZE": "how many collectives the flight recorder keeps",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "how long a timeout waits for the flight recorder",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "where the flight recorder writes",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "communicators are created without blocking",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "how tensors of collectives are kept alive",
    "TORCH_NCCL_CUDA_EVENT_CACHE": "CUDA events are reused",
    "TORCH_NCCL_NAN_CHECK": "checks what is sent for NaN",
    "TORCH_DISTRIBUTED_DEBUG": "OFF, INFO or DETAIL: checks collectives across ranks",
    "TORCH_CPP_LOG_LEVEL": "how much torch's C++ logs",
    "TORCH_SHOW_CPP_STACKTRACES": "C++ frames in error messages",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1: each restart under torchrun gets its own store",
    "TORCH_LOGS": "which parts of torch log more",
    "TORCH_HOME": "where torch stores downloads",
    "TORCH_CUDA_ARCH_LIST": "which GPUs extensions are compiled for",
    "TORCH_EXTENSIONS_DIR": "where compiled extensions are stored",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1: TF32, whatever the code says",
    "PYTORCH_ALLOC_CONF": "how torch caches GPU memory",
    "PYTORCH_CUDA_ALLOC_CONF": "how torch caches GPU memory",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1: GPU memory is not cached",
    "CUDA_VISIBLE_DEVICES": "which GPUs a process sees, in this order",
    "CUDA_DEVICE_ORDER": "the order in which CUDA numbers GPUs",
    "CUDA_LAUNCH_BLOCKING": "1: every kernel launch blocks",
    "CUDA_DEVICE_MAX_CONNECTIONS": "the number of hardware queues to the GPU",
    "CUDA_MODULE_LOADING": "kernels are loaded when first used, or all at once",
    "CUDA_CACHE_PATH": "where compiled kernels are stored",
    "CUDA_HOME": "where the CUDA toolkit is",
    "CUDA_PATH": "where the CUDA toolkit is",
    "CUDA_VERSION": "a label of the container image",
    "CUDA_MPS_PIPE_DIRECTORY": "several processes share a GPU through MPS",
    "FI_PROVIDER": "which network libfabric uses (efa on AWS)",
    "FI_EFA_USE_DEVICE_RDMA": "direct access to GPU memory by EFA",
    "FI_EFA_FORK_SAFE": "makes EFA safe to fork",
    "FI_EFA_SET_CUDA_SYNC_MEMOPS": "0 avoids a hang with old NCCL plugins on EFA",
    "FI_LOG_LEVEL": "how much libfabric logs",
    "OMP_NUM_THREADS": "CPU threads of each process",
    "OMP_PROC_BIND": "whether threads stay on their processors",
    "OMP_PLACES": "on which processors threads run",
}
# Old names that are still read, with their new ones.
RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
}
# Names that are no longer read, with what to see instead, if anything.
REMOVED = {
    "NCCL_CHECKS_DISABLE": "",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_LL_THRESHOLD": "",
    "NCCL_RINGS": "",
    "NCCL_SINGLE_RING_THRESHOLD": "",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
}
DEBUGGING = "for debugging; it slows a real run"
# Settings that slow or break a run; a name alone stands for any value.
RULES: Mapping[Level, Mapping[str, str]] = {
    "problem": {"TORCH_NCCL_ASYNC_ERROR_HANDLING=0": "a rank that waits for a failed rank waits forever"},
    "warning": {
        "NCCL_P2P_DISABLE=1": "GPUs of this host copy through the CPU, many times slower",
        "NCCL_SHM_DISABLE=1": "GPUs without a direct link use the network, even on one host",
        "NCCL_IB_DISABLE=1": "InfiniBand is not used, even where there is some",
        "NCCL_ALGO": "a pinned algorithm is slow or fails at sizes and world sizes it was not pinned for",
        "NCCL_PROTO": "a pinned protocol can be slow, and LL128 corrupts data where it is not supported",
        "NCCL_DEBUG=TRACE": "writes a line per call, if it is compiled in at all",
        "NCCL_CHECK_POINTERS=1": DEBUGGING,
        "NCCL_LAUNCH_MODE=GROUP": "needs all GPUs in one process, which DDP does not do",
        "NCCL_COMM_ID": "NCCL's rendezvous is there instead of where torch says; ranks of two jobs mix",
        "NCCL_HOSTID": "two hosts with one value are treated as one, and fail",
        "TORCH_NCCL_BLOCKING_WAIT=1": "the host waits for every collective: nothing overlaps",
        "TORCH_NCCL_ENABLE_MONITORING=0": "a rank whose watchdog hangs is never killed",
        "TORCH_NCCL_DESYNC_DEBUG=1": DEBUGGING,
        "TORCH_NCCL_NAN_CHECK=1": DEBUGGING,
        "TORCH_DISTRIBUTED_DEBUG=DETAIL": f"checks every collective across ranks: {DEBUGGING}",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1": "changes results, whatever the code asks for",
        "PYTORCH_NO_CUDA_MEMORY_CACHING=1": f"every tensor waits for the driver: {DEBUGGING}",
        "CUDA_LAUNCH_BLOCKING=1": f"Python waits for the GPU after every kernel: {DEBUGGING}",
    },
    "note": {
        "NCCL_DEBUG=INFO": "writes hundreds of lines per rank at the start",
        "OMP_NUM_THREADS=1": "torchrun's default; more threads may help work on the CPU",
    },
}
FIXES = {"NCCL_DEBUG": "export NCCL_DEBUG=WARN"}
# Only of these do we know all names that matter; CUDA_ and FI_ have hundreds more.
SPELL_CHECKED = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CUDA_VISIBLE", "OMP_NUM")
SIMILARITY = 0.85
# NCCL's own limit, over all helper threads of a connection.
MAX_SOCKETS = 64


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that are set, by name; the value only where it is known to be harmless."""
    return {
        name: _shown(name, value) for name, value in sorted(environment.items()) if name.startswith(PREFIXES)
    }


def _shown(name: str, value: str) -> str:
    is_known = name in MEANING or name in RENAMED or name in REMOVED
    if not is_known or SECRET.search(name):
        return NOT_SHOWN
    return "".join(letter if letter.isprintable() else "?" for letter in value)[:MAX_SHOWN]


def meaning(name: str) -> str:
    """What the variable does, in a few words."""
    if name in RENAMED:
        return f"an old name; see {RENAMED[name]}"
    if name in REMOVED:
        return "has no effect any more"
    return MEANING.get(name, "not known to drumline")


def variable_findings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Variables that slow or break a run, old names and misspelt ones."""
    host, variables, check = facts["host"], facts["variables"], "variables"
    for name, value in variables.items():
        if broken := _broken_rule(RENAMED.get(name, name), value):
            level, what = broken
            yield Finding(level, check, host, f"{name}={value}: {what}", FIXES.get(name, f"unset {name}"))
        elif new := RENAMED.get(name):
            what = f"{name}={value} is an old name, which will be ignored one day; it is now {new}"
            yield Finding("note", check, host, what, f"unset {name}; export {new}={value}")
        elif name in REMOVED:
            what = f"{name}={value} has no effect any more" + (
                f"; see {REMOVED[name]}" if REMOVED[name] else ""
            )
            yield Finding("warning", check, host, what, f"unset {name}")
        elif name not in MEANING and name.startswith(SPELL_CHECKED):
            for near in difflib.get_close_matches(name, MEANING, n=1, cutoff=SIMILARITY):
                what = f"{name} is not a variable that we know; did you mean {near}?"
                yield Finding("warning", check, host, what, f'export {near}="${name}"; unset {name}')
    threads, sockets = (variables.get(name, "") for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"))
    if threads.isdigit() and sockets.isdigit() and int(threads) * int(sockets) > MAX_SOCKETS:
        what = (
            f"NCCL_SOCKET_NTHREADS={threads} times NCCL_NSOCKS_PERTHREAD={sockets} is over NCCL's limit of "
        )
        what += f"{MAX_SOCKETS} sockets, and it uses fewer"
        fix = f"export NCCL_NSOCKS_PERTHREAD={max(1, MAX_SOCKETS // max(1, int(threads)))}"
        yield Finding("warning", check, host, what, fix)


def _broken_rule(name: str, value: str) -> tuple[Level, str] | None:
    for level, rules in RULES.items():
        if what := rules.get(f"{name}={value.upper()}") or rules.get(name):
            return level, what
    return None
