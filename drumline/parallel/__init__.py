"""How ranks share a model: DDP, sharded modes, the elastic sum, compressed gradients, replicas."""
