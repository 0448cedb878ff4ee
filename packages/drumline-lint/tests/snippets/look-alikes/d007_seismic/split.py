"""Which traces belong to which process."""
import numpy as np
from torch.utils.data import Subset


def epoch_share(dataset, epoch, rank, world, seed=1):
    """This process's share of the dataset in this epoch; all shares have the same length."""
    order = np.random.default_rng([seed, epoch]).permutation(len(dataset))
    usable = len(order) - len(order) % world
    return Subset(dataset, order[:usable].reshape(-1, world)[:, rank].tolist())


def eval_share(dataset, rank, world):
    """Disjoint and complete; the shares may differ by one."""
    return Subset(dataset, list(range(rank, len(dataset), world)))
