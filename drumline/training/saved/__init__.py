"""A checkpoint of a run, used after it: evaluated, exported, or to predict."""
