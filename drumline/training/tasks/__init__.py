"""What is trained: the `Task` that a user writes, and the built-in ones."""
