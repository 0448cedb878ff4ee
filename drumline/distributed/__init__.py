"""Step 3 of a run: the process group. Rendezvous, collectives, comparisons across ranks, seeds, wrapping, and who failed first."""
