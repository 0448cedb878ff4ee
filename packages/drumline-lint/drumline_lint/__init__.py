"""Finds mistakes of distributed training in PyTorch code. Reads source only, and imports neither it
nor torch.

`reading` finds and parses files, `program` resolves names, `flow` and `training` find out what each
rank does, `rules` look for one mistake each, `output` writes the report.
"""

__version__ = "0.1.0"
