"""A real process group: collectives and a DDP step whose results are known. Only here the doctor imports torch."""
