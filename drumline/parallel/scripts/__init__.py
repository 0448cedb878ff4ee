"""A user's own training script, run with the watchdog: observed through torch, profiled, its
replicas compared."""
