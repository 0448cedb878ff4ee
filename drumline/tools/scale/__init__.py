"""Why several ranks are not as many times as fast: profiles of steps, measured scaling,
predictions."""
