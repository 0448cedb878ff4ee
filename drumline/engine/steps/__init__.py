"""One optimizer step, in each of the ways that it may run: eager, compiled, captured as a graph, shard by shard."""
