"""The sidecar: a process that observes the ranks of a node and is connected to the other nodes'
sidecars. No torch."""
