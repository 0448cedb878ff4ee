"""What is saved (`state`), how it is copied (`copying`), written (`store`), listed (`catalog`) and kept.

Nothing is imported here, so that `drumline verify` needs no torch.
"""
