"""Who comes where: the order of a run, which ranks and processes reach a place, and what holds there."""
