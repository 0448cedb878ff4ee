"""2. Which rank this process is, and how ranks are started on one machine or many."""
