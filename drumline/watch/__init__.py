"""9. Beside the run, never in its way: does every rank move, and are all replicas still the same?"""
