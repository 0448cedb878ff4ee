"""2. Who runs where: which rank this process is, and how ranks are started on one machine or many."""
