"""Step 4 of a run: datasets, the order in which their samples are seen, and the batches that reach
the device.

In the order of a batch: `sharding` (the order of samples, their random numbers, which rank gets
which, and the ledger of those trained on), `dataset` (kinds of datasets, and how a batch is made),
`delivery` (making batches ahead of time, and copying them to the device), `loader` and
`stream_loader` (steps for the engine, and batches of an evaluation).
"""
