"""Trains a net in the functional way, replicated by pmap: ranks are the library's affair."""

import argparse
import functools
import pickle
import time

import jax
import jax.numpy as jnp
import numpy as np


def initial(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (m, n)) * jnp.sqrt(2 / m), "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:])
    ]


def forward(parameters, inputs):
    for layer in parameters[:-1]:
        inputs = jax.nn.relu(inputs @ layer["w"] + layer["b"])
    return inputs @ parameters[-1]["w"] + parameters[-1]["b"]


def loss_of(parameters, inputs, labels):
    logits = forward(parameters, inputs)
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])


@functools.partial(jax.pmap, axis_name="devices")
def step(parameters, inputs, labels):
    loss, gradients = jax.value_and_grad(loss_of)(parameters, inputs, labels)
    gradients = jax.lax.pmean(gradients, "devices")
    loss = jax.lax.pmean(loss, "devices")
    return jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, parameters, gradients), loss


def batches(count, size, devices, seed):
    draw = np.random.default_rng(seed)
    for _ in range(count):
        inputs = draw.normal(size=(devices, size, 10)).astype(np.float32)
        yield inputs, (inputs[..., 0] > inputs[..., 1]).astype(np.int32)


def save(path, parameters):
    with open(path, "wb") as file:
        pickle.dump(jax.device_get(jax.tree_util.tree_map(lambda leaf: leaf[0], parameters)), file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", default="parameters.pickle")
    args = parser.parse_args()
    devices = jax.local_device_count()
    rank = jax.process_index()
    parameters = initial(jax.random.PRNGKey(0), [10, 64, 2])
    parameters = jax.device_put_replicated(parameters, jax.local_devices())
    began = time.time()
    for number, (inputs, labels) in enumerate(batches(args.steps, args.batch, devices, seed=rank)):
        parameters, loss = step(parameters, inputs, labels)
        print(f"step {number}: {loss[0].item():.4f} after {time.time() - began:.1f} s")
    if rank == 0:
        save(args.out, parameters)


if __name__ == "__main__":
    main()
