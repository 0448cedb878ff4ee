from torch.nn.parallel import DistributedDataParallel


def unwrap(model):
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return getattr(model, "_orig_mod", model)
