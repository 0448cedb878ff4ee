"""The sidecar: a process that observes the ranks of a node and talks to the other nodes' sidecars. No torch."""
