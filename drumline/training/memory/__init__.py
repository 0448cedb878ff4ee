"""How much memory a step takes, found out before it is taken."""
