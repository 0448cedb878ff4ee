"""Before there is a group: the rendezvous of ranks, what each is about to run, and which hosts
reach each other."""
