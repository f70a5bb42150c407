"""The benchmark `hplm bench request`: latency and throughput of whole requests through the client."""

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
from hplm_loadtest.benchmarks.benchmark_server import benchmark_server
from hplm_loadtest.benchmarks.served_repository import single_text_tenants
from hplm_loadtest.workloads.texts import wikipedia_sentences

TenantText = tuple[str, str]  # a tenant and a text for it


async def send_all(
    url: str, texts: list[TenantText], concurrency: int, texts_per_request: int
) -> tuple[float, list[float]]:
    """Send all texts with `concurrency` requests under way; return the seconds of all requests together and of each."""
    size = texts_per_request
    requests = iter([texts[first : first + size] for first in range(0, len(texts), size)])
    request_s: list[float] = []

    async def worker(client: AsyncClient) -> None:
        for request in requests:
            start = time.perf_counter()
            await client.predict_batch(request)
            request_s.append(time.perf_counter() - start)

    async with AsyncClient(url, concurrency=concurrency) as client:
        start = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(concurrency)))
        return time.perf_counter() - start, request_s


def whole_requests(models: Path, rounds: int, count: int, concurrency: int, request_sizes: Sequence[int]) -> Report:
    """Measure the latency of one request at a time and the throughput of many, over gRPC and HTTP.

    request_sizes: numbers of texts per request. concurrency: number of texts under way in the measurement of throughput.
    """
    names = single_text_tenants(models)
    sentences = wikipedia_sentences(400)
    texts = [(names[i % len(names)], sentences[i % len(sentences)]) for i in range(count)]
    latency: dict[tuple[str, int], list[float]] = defaultdict(list)
    throughput: dict[tuple[str, int], list[float]] = defaultdict(list)
    with benchmark_server(models) as server, progress_bars() as progress:
        urls = {"grpc": server.ports.grpc_url, "http": server.ports.http_url}
        kinds = list(product(urls, request_sizes))
        bar = progress.add_task("requests", total=len(kinds) * (rounds + 1))
        for turn in range(rounds + 1):
            for protocol, size in kinds:
                under_way = max(1, concurrency // size)
                _, alone_s = asyncio.run(send_all(urls[protocol], texts[: max(size, count // 8)], 1, size))
                seconds, _ = asyncio.run(send_all(urls[protocol], texts, under_way, size))
                if turn:  # the first round does not count
                    latency[protocol, size] += alone_s
                    throughput[protocol, size].append(count / seconds)
                progress.update(bar, advance=1)
    rows = []
    for protocol, size in kinds:
        p50, p95, p99 = np.percentile(np.array(latency[protocol, size]) * 1000, [50, 95, 99])
        rates = np.array(throughput[protocol, size])
        rows.append(
            {
                "protocol": protocol,
                "texts": size,
                "p50_ms": float(p50),
                "p95_ms": float(p95),
                "p99_ms": float(p99),
                "texts_per_s": float(np.median(rates)),
                "spread": f"{100 * rates.min() / np.median(rates):.0f}-{100 * rates.max() / np.median(rates):.0f} %",
            }
        )
    words = np.mean([len(text.split()) for _, text in texts])
    settings = {"texts": count, "concurrency": concurrency, "rounds": rounds, "tenants": len(names)}
    return Report("request", {**settings, "mean_words": round(float(words), 1), "client": "same machine"}, rows)
