"""Room 7 of the house: what is saved (`state`, `rng`), how it survives (`store`, `look`), what stays (`retention`).

Nothing is imported here, so that what only looks at checkpoints (`drumline verify`) does without torch.
"""
