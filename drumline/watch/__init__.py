"""The watchdog: does every rank make progress, what blocks the run, and are all replicas still the same?"""
