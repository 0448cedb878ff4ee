"""What is saved (`state`), how it is copied (`copying`), written (`store`), listed (`catalog`) and
kept (`retention`).

Nothing is imported here, so that `drumline verify` needs no torch.
"""
