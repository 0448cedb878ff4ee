"""What training code does: models, loaders, losses, steps, seeds, devices, saves and what is shown."""
