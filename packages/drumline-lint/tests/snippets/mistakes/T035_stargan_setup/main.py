import argparse

from munch import Munch
import yaml

from solver import Solver
from dist_utils import init_dist


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg", type=str, default="cfg/afhq.yaml")
    parser.add_argument("--mode", choices=["train", "sample"], default="train")
    cli = parser.parse_args()
    with open(cli.cfg) as f:
        cfg = Munch.fromDict(yaml.safe_load(f))
    cfg.mode = cli.mode
    cfg.rank, cfg.world_size = init_dist()
    Solver(cfg).run()


if __name__ == "__main__":
    main()
