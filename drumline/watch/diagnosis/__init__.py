"""What is wrong with a run that does not move: pure reasoning over what the sidecars saw."""
