"""The watch inside a rank: its beats, its answers to the sidecar, and the sidecar's start."""
