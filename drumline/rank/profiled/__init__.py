"""A profile of some steps of a rank: the trace of torch, and what it lacks."""
