"""`hplm bench request`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
from hplm_client import AsyncClient

from hplm.progress import progress_bars
from hplm.report import Report
from hplm_loadtest.models import served_names
from hplm_loadtest.texts import unseen_sentences
from hplm_loadtest.variants import serving

Pair = tuple[str, str]


async def drive(url: str, pairs: list[Pair], concurrency: int) -> tuple[float, list[float]]:
    """Send all pairs, `concurrency` at a time: seconds in all, and the seconds of each request."""
    waiting = iter(pairs)
    taken: list[float] = []

    async def worker(client: AsyncClient) -> None:
        for tenant, text in waiting:
            start = time.perf_counter()
            await client.predict(tenant, text)
            taken.append(time.perf_counter() - start)

    async with AsyncClient(url, concurrency=concurrency) as client:
        start = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(concurrency)))
        return time.perf_counter() - start, taken


def whole_requests(models: Path, rounds: int, count: int, concurrency: int) -> Report:
    """Latency of one request at a time and throughput of many, over gRPC and HTTP, of a server started for this."""
    names = served_names(models)
    sentences = unseen_sentences(400)
    pairs = [(names[i % len(names)], sentences[i % len(sentences)]) for i in range(count)]
    latency: dict[str, list[float]] = {"grpc": [], "http": []}
    throughput: dict[str, list[float]] = {"grpc": [], "http": []}
    with serving(models, plot={}, upper={}) as server, progress_bars() as progress:
        urls = {"grpc": server.ports.grpc_url, "http": server.ports.http_url}
        bar = progress.add_task("requests", total=2 * (rounds + 1))
        for turn in range(rounds + 1):
            for protocol, url in urls.items():
                _, alone = asyncio.run(drive(url, pairs[: count // 8], 1))
                seconds, _ = asyncio.run(drive(url, pairs, concurrency))
                if turn:
                    latency[protocol] += alone
                    throughput[protocol].append(count / seconds)
                progress.update(bar, advance=1)
    rows = []
    for protocol in urls:
        p50, p95, p99 = np.percentile(np.array(latency[protocol]) * 1000, [50, 95, 99])
        rates = np.array(throughput[protocol])
        rows.append(
            {
                "protocol": protocol,
                "p50_ms": float(p50),
                "p95_ms": float(p95),
                "p99_ms": float(p99),
                "requests_per_s": float(np.median(rates)),
                "spread": f"{100 * rates.min() / np.median(rates):.0f}-{100 * rates.max() / np.median(rates):.0f} %",
            }
        )
    words = np.mean([len(text.split()) for _, text in pairs])
    about = {"requests": count, "concurrency": concurrency, "rounds": rounds, "tenants": len(names)}
    return Report("request", {**about, "mean_words": round(float(words), 1), "client": "same machine"}, rows)
