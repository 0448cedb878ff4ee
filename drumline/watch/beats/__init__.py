"""What every rank says of itself, step by step, in a few bytes of shared memory."""
