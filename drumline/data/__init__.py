"""Step 4 of a run: datasets, the order in which their samples are seen, and the batches that reach the device."""
