"""Small placement problems that tests search."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hplm.placement.cluster import Cluster, uniform_cluster
from hplm.placement.served_model import IntraCost, ServedModel
from hplm.workloads.model_requests import ModelRequests
from hplm.workloads.model_traffic import gamma_requests
from hplm.workloads.popularity import power_law

GB = 10**9


def model(name: str, latency_s: float = 0.1, layers: int = 4, gb: float = 4.0, intra: bool = False) -> ServedModel:
    """Return a model of equal layers."""
    return ServedModel(
        name,
        (latency_s / layers,) * layers,
        (int(gb * GB) // layers,) * layers,
        hop_s=0.0005,
        intra=IntraCost(0.15) if intra else None,
    )


@dataclass(frozen=True)
class Case:
    """What a search gets."""

    models: tuple[ServedModel, ...]
    cluster: Cluster
    requests: ModelRequests


def case(
    models: tuple[ServedModel, ...],
    devices: int,
    *,
    load: float = 0.5,
    cv: float = 3.0,
    scale: float = 4.0,
    skew: float = 0.5,
    count: int = 600,
    per_node: int = 8,
    device_gb: float = 13.0,
    seed: int = 0,
) -> Case:
    """Return a case whose requests need the share `load` of the devices' time; deadlines are `scale` latencies."""
    shares = power_law(tuple(one.name for one in models), skew)
    rate = load * devices / sum(shares[one.name] * one.latency_s for one in models)
    requests = gamma_requests(
        {name: share * rate for name, share in shares.items()},
        cv,
        {one.name: scale * one.latency_s for one in models},
        count / rate,
        np.random.default_rng(seed),
    )
    return Case(models, uniform_cluster(devices, int(device_gb * GB), per_node=per_node), requests)


def random_case(seed: int) -> Case:
    """Return a random case of three to eight models on two to six devices."""
    rng = np.random.default_rng(seed)
    models = [
        model(
            f"m{number}",
            float(rng.choice([0.1, 0.15, 0.3])),
            int(rng.integers(4, 9)),
            float(rng.uniform(2, 8)),
            bool(rng.random() < 0.7),
        )
        for number in range(int(rng.integers(3, 9)))
    ]
    if rng.random() < 0.5:
        models = [replace(models[0], name=one.name) for one in models]
    return case(
        tuple(models),
        int(rng.integers(2, 7)),
        load=float(rng.uniform(0.1, 1.0)),
        cv=float(rng.choice([1, 2, 4])),
        scale=float(rng.choice([1.5, 2, 3, 5, 8])),
        skew=float(rng.uniform(0, 1.2)),
        count=1500,
        seed=seed,
    )
