"""The watchdog's part in a rank: its heartbeat, its answers to the sidecar, and the sidecar's
start."""
