"""One node of a job: how it meets the others, starts its ranks by torchrun's agent, and leaves none behind."""
