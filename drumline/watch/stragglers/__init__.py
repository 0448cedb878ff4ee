"""Ranks and hosts that are slower than their peers: by the beats, while the run goes on."""
