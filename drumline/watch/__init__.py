"""The watchdog: checks that every rank makes progress, finds what blocks the run, and compares the
replicas."""
