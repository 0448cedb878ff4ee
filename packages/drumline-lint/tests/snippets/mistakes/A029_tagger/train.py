import torch.distributed as dist

from engine import Engine
from settings import get_settings


def main():
    settings = get_settings()
    engine = Engine(settings)
    try:
        engine.run()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
