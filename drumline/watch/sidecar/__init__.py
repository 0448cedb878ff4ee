"""The sidecar: a process that observes the ranks of a node and is connected to the other nodes'
sidecars. No torch.

It reads its options on stdin, and then:
- of each rank, five times a second: its heartbeat and its /proc entries; in a script also where its
  time goes and its report (`local_ranks.py`, `rank_process.py`), from files in the watch folder;
- in the watch folder, how a rank exited, and whether the launcher ended it;
- without progress: each rank's answer to a question, stacks, DataLoader workers and collectives
  (`rank_process.py`); the kernel's log, memory limits and network interfaces
  (`system_evidence.py`);
- messages of the other sidecars (`sidecar_network.py`); as the leader, with a lost node, what the
  launcher knows of the hosts.
"""
