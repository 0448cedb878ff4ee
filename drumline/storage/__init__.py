"""Object stores, for checkpoints and data: `object_store.py` is what others use."""
