"""What is saved (`state`), how it is copied and written (`writer`, `store`), kept
(`retention`) and uploaded (`mirror`).

Nothing is imported here, so that `drumline verify` needs no torch.
"""
