"""3. The process group: rendezvous, collectives, comparisons across ranks, seeds, wrapping, and who failed first."""
