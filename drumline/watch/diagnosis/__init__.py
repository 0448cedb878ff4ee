"""What is wrong with a run that makes no progress: pure functions of what the sidecars observed."""
