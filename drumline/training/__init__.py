"""6. The only place where steps happen: the step, the loop around it, evaluation, and the run
folder."""
