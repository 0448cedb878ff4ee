"""Jobs that run on without the command that started them: a keeper on each node, and the commands that ask it."""
