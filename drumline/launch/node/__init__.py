"""One node of a job: the rendezvous with the others, its ranks under torchrun's agent, and their end."""
