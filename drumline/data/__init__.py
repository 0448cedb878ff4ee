"""Step 4 of a run: datasets, the order in which their samples are seen, and the batches that reach the device.

On the way of a batch: `dataset` (what a dataset offers, and how a batch is made of it), `draws` (order and randomness),
`sharding` (which rank gets which samples), `workers` (batches are made ahead of time), `delivery` (they are copied to
the device), `loader` and `stream_loader` (steps for the engine), `ledger` (which samples were trained on).
"""
