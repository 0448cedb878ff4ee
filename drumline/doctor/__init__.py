"""Before a run: is this machine, and every pair of hosts, fit for the job? Only `collectives.py` and
what it is made of import torch."""
