"""One process of a job: its rendezvous with the others, the process group, collectives, and how it
fails."""
