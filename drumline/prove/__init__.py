"""Proves on the user's own job that a killed and resumed run is the same: starts runs, reads their folders."""
