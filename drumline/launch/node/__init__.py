"""One node of a job: the rendezvous with other nodes, and its ranks under torchrun's agent."""
