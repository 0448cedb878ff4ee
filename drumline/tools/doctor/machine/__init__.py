"""The facts of one machine, and what is wrong with it. Nothing here loads torch."""
