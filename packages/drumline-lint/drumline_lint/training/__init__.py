"""What training code does: models, loaders, steps, tensors, seeds and saves."""
