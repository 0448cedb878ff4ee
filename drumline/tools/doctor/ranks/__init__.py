"""A real process group: collectives and a DDP step with known results. Only this part of the doctor
imports torch."""
