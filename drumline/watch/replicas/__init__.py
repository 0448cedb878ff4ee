"""Whether all replicas still hold the same bits."""
