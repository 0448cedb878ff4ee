import wandb


class NullTracker:
    def log(self, values, step):
        pass

    def close(self):
        pass


class WandbTracker:
    def __init__(self, project, config):
        self.run = wandb.init(project=project, config=config)

    def log(self, values, step):
        self.run.log(values, step=step)

    def close(self):
        self.run.finish()


def make_tracker(env, project, config):
    return WandbTracker(project, config) if env.is_main else NullTracker()
