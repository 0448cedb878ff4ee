"""9. Beside the run, never in its way: are all replicas still the same?"""
