"""`hplm bench request`."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
from hplm_client import AsyncClient

from hplm.reporting.benchmark_result import Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.models import served_names
from hplm_loadtest.benchmarks.variants import serving
from hplm_loadtest.workloads.texts import unseen_sentences

Pair = tuple[str, str]


async def drive(url: str, pairs: list[Pair], concurrency: int, together: int) -> tuple[float, list[float]]:
    """Send all pairs, so many `together` in a request and `concurrency` requests at a time: seconds in all, and of each."""
    waiting = iter([pairs[first : first + together] for first in range(0, len(pairs), together)])
    taken: list[float] = []

    async def worker(client: AsyncClient) -> None:
        for some in waiting:
            start = time.perf_counter()
            await client.predict_batch(some)
            taken.append(time.perf_counter() - start)

    async with AsyncClient(url, concurrency=concurrency) as client:
        start = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(concurrency)))
        return time.perf_counter() - start, taken


def whole_requests(models: Path, rounds: int, count: int, concurrency: int, together: Sequence[int]) -> Report:
    """Latency of one request at a time and throughput of many, over gRPC and HTTP, of a server started for this.

    For each number of texts that go `together` in a request; `concurrency` is how many texts are under way.
    """
    names = served_names(models)
    sentences = unseen_sentences(400)
    pairs = [(names[i % len(names)], sentences[i % len(sentences)]) for i in range(count)]
    latency: dict[tuple[str, int], list[float]] = defaultdict(list)
    throughput: dict[tuple[str, int], list[float]] = defaultdict(list)
    with serving(models, plot={}, upper={}) as server, progress_bars() as progress:
        urls = {"grpc": server.ports.grpc_url, "http": server.ports.http_url}
        kinds = list(product(urls, together))
        bar = progress.add_task("requests", total=len(kinds) * (rounds + 1))
        for turn in range(rounds + 1):
            for protocol, texts in kinds:
                under_way = max(1, concurrency // texts)
                _, alone = asyncio.run(drive(urls[protocol], pairs[: max(texts, count // 8)], 1, texts))
                seconds, _ = asyncio.run(drive(urls[protocol], pairs, under_way, texts))
                if turn:
                    latency[protocol, texts] += alone
                    throughput[protocol, texts].append(count / seconds)
                progress.update(bar, advance=1)
    rows = []
    for protocol, texts in kinds:
        p50, p95, p99 = np.percentile(np.array(latency[protocol, texts]) * 1000, [50, 95, 99])
        rates = np.array(throughput[protocol, texts])
        rows.append(
            {
                "protocol": protocol,
                "texts": texts,
                "p50_ms": float(p50),
                "p95_ms": float(p95),
                "p99_ms": float(p99),
                "texts_per_s": float(np.median(rates)),
                "spread": f"{100 * rates.min() / np.median(rates):.0f}-{100 * rates.max() / np.median(rates):.0f} %",
            }
        )
    words = np.mean([len(text.split()) for _, text in pairs])
    about = {"texts": count, "concurrency": concurrency, "rounds": rounds, "tenants": len(names)}
    return Report("request", {**about, "mean_words": round(float(words), 1), "client": "same machine"}, rows)
