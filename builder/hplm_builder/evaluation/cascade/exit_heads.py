"""Heads on each computed layer of a trained tenant, for the comparison with an early exit (DeeBERT, two-stage training).

The tenant's adapters and its own head stay as they are served. Heads on earlier layers are fitted on the train examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hplm.adapters.tenant import Tenant
from hplm.core.settings import REDUCTION_FACTOR
from hplm.engine.encode import pool
from hplm.models.base import Base
from hplm.models.device import CPU, computing_in, in_dtype
from hplm.profiles.profile import Profile, interpolate
from hplm.tasks.task import log_softmax
from hplm.tasks.task_loader import task_named
from hplm_builder.evaluation.cascade.answered import Floats, Integers
from hplm_builder.tenants.bodies import AdapterModel, fastest_format
from hplm_builder.tenants.judging import BATCH
from hplm_builder.tenants.prepared import Prepared

States = npt.NDArray[np.float16]  # [layers, N, H]
Head = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]  # [labels, H] and [labels]
# Weight decays that are tried for a layer's head; dev chooses.
DECAYS = (1e-4, 1e-3, 1e-2)
# Steps of L-BFGS for a head. The loss is convex, and 60 steps end within 0.1 % of its minimum.
STEPS = 60


def layer_states(
    base: Base, tenant: Tenant, examples: Sequence[Prepared], tick: Callable[[int], None] = lambda texts: None
) -> States:
    """Return what a head on each layer would read of each example: `[layers, N, H]`.

    `tick` is called with the number of examples of each batch.
    """
    frozen = in_dtype(base.load_upper(), fastest_format()[0])
    body = AdapterModel(frozen, REDUCTION_FACTOR, tenant.adapter, tenant.card.adapter_at)
    task, pooling = task_named(tenant.card.task), tenant.card.pooling
    states = np.zeros((base.config.upper_layers, len(examples), base.config.hidden_size), np.float16)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens))
    for start in range(0, len(order), BATCH):
        chunk = order[start : start + BATCH]
        lengths = [len(examples[i].tokens) for i in chunk]
        features = torch.cat([examples[i].features for i in chunk])
        with torch.no_grad(), computing_in(*fastest_format(CPU)):
            layers = body.layer_states(features, lengths)
        for number, hidden in enumerate(layers):
            for i, part in zip(chunk, hidden.float().split(lengths), strict=True):
                states[number, i] = pool(task, pooling, part)[0].numpy()
        tick(len(chunk))
    return states


def fit_heads(
    train: States, train_gold: Integers, dev: States, dev_gold: Integers, labels: int, served: Head
) -> list[Head]:
    """Return a head for each layer; the last is `served`. Each head is fitted on train, with the decay that is best on dev."""
    heads = []
    for of_train, of_dev in zip(train[:-1], dev[:-1], strict=True):
        fitted = [_fit(of_train, train_gold, labels, decay) for decay in DECAYS]
        right = [int((logits_of(of_dev, head).argmax(1) == dev_gold).sum()) for head in fitted]
        heads.append(fitted[int(np.argmax(right))])
    return [*heads, served]


def _fit(states: npt.NDArray[np.float16], gold: Integers, labels: int, decay: float) -> Head:
    """Return the head with the least cross-entropy and weight decay on standardised states."""
    raw = torch.from_numpy(states.astype(np.float32))
    mean, deviation = raw.mean(0), raw.std(0) + 1e-6
    inputs, targets = (raw - mean) / deviation, torch.from_numpy(gold)
    weight = torch.zeros(labels, inputs.shape[1], requires_grad=True)
    bias = torch.zeros(labels, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value: Tensor = F.cross_entropy(inputs @ weight.T + bias, targets) + decay * weight.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    # The standardisation becomes part of the head, so that a head reads the states themselves.
    scaled = (weight / deviation).detach()
    return scaled.numpy(), (bias.detach() - scaled @ mean).numpy()


def logits_of(states: npt.NDArray[np.float16], head: Head) -> npt.NDArray[np.float32]:
    """Return `[N, labels]`."""
    weight, bias = head
    logits: npt.NDArray[np.float32] = states.astype(np.float32) @ weight.T + bias
    return logits


def exits_of(states: States, heads: Sequence[Head]) -> tuple[Integers, Floats]:
    """Return the answers of all heads to the texts of `states`, and how sure they are: each `[layers, N]`."""
    answers, confidences = [], []
    for of_layer, head in zip(states, heads, strict=True):
        logs = log_softmax(logits_of(of_layer, head))
        answers.append(logs.argmax(1))
        confidences.append(np.exp(logs.max(1)))
    return np.array(answers), np.array(confidences)


def exit_latency_ms(profile: Profile, layers: int, tokens: Integers) -> Floats:
    """Return `[layers, N]`: the milliseconds of a request that leaves after each layer, less the layers that it skips.

    A quick profile has no times of layers: then each layer takes an equal share of the encode stage. The times of heads are
    left out, because a head is one small product.
    """
    by_length = {int(length): _length_latency_ms(profile, layers, int(length)) for length in np.unique(tokens)}
    return np.stack([by_length[int(length)] for length in tokens], axis=1)


def _length_latency_ms(profile: Profile, layers: int, length: int) -> Floats:
    def at_length(points: Sequence[tuple[int, float]]) -> float:
        return interpolate(sorted(points), length)

    if alone := [timing for timing in profile.layers if timing.texts == 1]:
        layer_ms = np.array([at_length([(timing.tokens, timing.ms[i]) for timing in alone]) for i in range(layers)])
    else:
        encode_ms = at_length([(timing.tokens, timing.ms) for timing in profile.encode if timing.texts == 1])
        layer_ms = np.full(layers, encode_ms / layers)
    # The sum of the layers that come after each layer.
    skipped = np.concatenate([np.cumsum(layer_ms[::-1])[::-1][1:], [0.0]])
    return np.maximum(profile.latency_ms(length) - skipped, 0.0)
