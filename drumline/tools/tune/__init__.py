"""`drumline tune`: variables of NCCL and gloo, and what NCCL's logs show."""
