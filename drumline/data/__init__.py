"""Step 4 of a run: datasets, the order in which their samples are seen, and the batches that reach
the device.

In the order of a batch: `dataset` (kinds of datasets, and how a batch is made), `draws` (order and
random numbers), `sharding` (which rank gets which samples), `workers` (making batches ahead of
time), `delivery` (copying them to the device), `loader` and `stream_loader` (steps for the engine),
`ledger` (which samples were trained on).
"""
