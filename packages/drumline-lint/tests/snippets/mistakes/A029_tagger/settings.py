import argparse


def get_settings():
    p = argparse.ArgumentParser()
    p.add_argument("--features", default="libri_feats.pt")
    p.add_argument("--accum-grad", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=12)
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--lr", type=float, default=4e-4)
    return p.parse_args()
