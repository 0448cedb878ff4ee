"""Control flow: which ranks and processes reach a place, in which order, and under which
conditions."""
