"""How much memory and computing a step takes, found out before it is taken."""
