"""Step 2 of a run: how ranks are started, on one machine or many."""
