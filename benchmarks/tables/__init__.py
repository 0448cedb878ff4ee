"""One module per table; `python -m benchmarks NAME` makes it."""
