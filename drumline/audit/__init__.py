"""After a run, or during it: is its folder whole? Reads only, wherever the folder can be seen, and without torch."""
