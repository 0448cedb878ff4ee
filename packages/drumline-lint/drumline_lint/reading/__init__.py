"""Finds files and parses Python, notebooks and shell scripts."""
