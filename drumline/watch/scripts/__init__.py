"""Whether the ranks of a script that knows nothing of the watch run the same program. Pure reasoning, without torch."""
