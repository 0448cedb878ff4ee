"""Measures what Drumline costs and gains; README.md lists which command makes which table."""
