"""Resolves the names of the given files, without running them."""
