"""Step 3 of a run: the process group, from the rendezvous of ranks to its end, and what ranks
exchange."""
