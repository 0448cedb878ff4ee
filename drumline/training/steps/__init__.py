"""The kinds of optimizer steps: eager, compiled, captured as a graph, shard by shard."""
