"""2. Who runs where: how this process learns its place, and how ranks are started."""
