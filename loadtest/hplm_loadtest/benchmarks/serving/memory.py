"""The benchmark `hplm bench memory`: HMI's Table 2, the memory of one more tenant on the device and on the host."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hplm.adapters.bank_file import BankFile
from hplm.core.settings import EncodeSettings
from hplm.engine.adapter_slots import AdapterSlots
from hplm.errors import ConfigError
from hplm.models.device import choose_device, choose_dtype
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.charts import check_picture, line_chart
from hplm.reporting.progress import progress_bars
from hplm.store import artifact
from hplm.store.layout import Store
from hplm.triton.workarounds.dead_stubs import stubs_of
from hplm_loadtest.peers.systems import Fleet, Limits, Shape, Systems, open_fleet, slots_of
from hplm_loadtest.peers.whole_model import file_bytes, whole_config
from hplm_loadtest.scenarios.grpc_load import closed_loop
from hplm_loadtest.workloads.load_plan import Requests

COUNTS = [10, 1_000, 10_000]
HOST_GOAL_GIB = 24.0
GIB = 2**30


def server_memory(triton: int) -> dict[str, Counter[str]]:
    """Return the bytes of a Triton server by process: of `tritonserver` and of its models `hbert_plot` and `hbert_upper`.

    pss: memory that several processes map counts in equal shares. mapped: the part of `pss` that is files, which the system
    frees when needed. private: the rest of `pss`. rss: all memory that a process maps.
    """
    memories: dict[str, Counter[str]] = defaultdict(Counter)
    for pid, name in {triton: "tritonserver", **stubs_of(triton)}.items():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # the process has just ended
            continue
        sizes = {key: int(rest.split()[0]) * 1024 for key, _, rest in (line.partition(":") for line in lines)}
        private = sizes["Pss_Anon"] + sizes["Pss_Shmem"]
        memories[name].update(rss=sizes["Rss"], pss=sizes["Pss"], private=private, mapped=sizes["Pss_File"])
    return memories


def slot_bytes(fleet: Fleet, settings: EncodeSettings, counts: Sequence[int]) -> dict[int, int]:
    """Return the device memory of the adapter slots after the adapters of each number of tenants were loaded into them."""
    base = fleet.base.config
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    reduced_size = base.reduced_size(settings.reduction_factor)
    # Without the prefetch thread, which could still hold copied adapters when the memory is read.
    slots = AdapterSlots(base, slots_of(settings), reduced_size, device, dtype, fine_prefetch=False)
    bank = _bank(fleet)
    bytes_by_count, done = {}, 0
    try:
        for count in counts:
            for name in bank.names[done:count]:
                with slots.assigned([bank.load(name, verify=False)]) as assigned:
                    for fill in assigned.fills:
                        fill.wait_all()
            done = count
            is_cuda = device.type == "cuda"
            bytes_by_count[count] = torch.cuda.memory_allocated(device) - before if is_cuda else slots.device_bytes
    finally:
        slots.close()
    return bytes_by_count


def memory_by_tenants(folder: Path | None, shape: Shape, counts: Sequence[int], picture: Path | None) -> Report:
    """Measure one server's memory after each number of tenants got one request; all tenants stay in host memory."""
    check_picture(picture)
    counts = sorted(set(counts))
    if len(counts) < 2:
        raise ConfigError(
            "an added tenant's memory is measured between two numbers of tenants: give --tenants twice, with different numbers"
        )
    folder = folder or Path(f"build/fleet-{shape}-10000")
    fleet = open_fleet(folder, shape, max(counts))
    bank = _bank(fleet)
    tenant = bank.load(bank.names[0], verify=False)
    disk_bytes = sum(path.stat().st_size for path in bank.folder.iterdir()) / len(bank.names)
    settings = fleet.upper
    # Room for all tenants, and a fifth more.
    host_cache_mb = int(1.2 * max(counts) * tenant.packed.weights.nbytes / 1e6) + 64
    servers = Systems(fleet, Limits(), {"host_cache_mb": host_cache_mb})
    rows: list[dict[str, Any]] = []
    with progress_bars() as progress:
        servers.prepare("hbert", progress)
        bar = progress.add_task("tenants", total=max(counts))
        on_device = slot_bytes(fleet, settings, counts)
        with servers.start("hbert") as server:
            server.wait_ready()
            done = answered = 0
            for count in counts:
                names = bank.names[done:count]
                texts = [fleet.texts[i % len(fleet.texts)] for i in range(len(names))]
                run = closed_loop(server.ports.grpc_url, Requests(names, texts, np.full(len(names), np.nan)), 64)
                progress.update(bar, advance=len(names))
                done = count
                answered += run.kinds["answered"]
                rows.append(_row(count, server_memory(server.process.pid), on_device[count], answered))
    if picture is not None:
        draw(picture, rows, shape)
    first, last = rows[0], rows[-1]
    added = last["tenants"] - first["tenants"]
    per_tenant = {
        "device_bytes": (last["slot_mb"] - first["slot_mb"]) * 1e6 / added,
        "host_bytes": (last["private_mb"] - first["private_mb"]) * 1e6 / added,
        "disk_bytes": disk_bytes,
    }
    full = file_bytes(whole_config(fleet.base.config), choose_dtype(settings.dtype, choose_device(settings.device)))
    head = sum(array.nbytes for array in tenant.head.arrays.values())
    rows += [
        {"system": "hbert, an added tenant", **per_tenant},
        {"system": "dedicated, its file", "device_bytes": full, "host_bytes": full, "disk_bytes": full},
        {"system": "shared, its head", "device_bytes": 0, "host_bytes": head, "disk_bytes": head},
    ]
    result_settings = {
        "shape": shape,
        "fleet": str(folder),
        "num_slots": slots_of(settings),
        "host_cache_mb": host_cache_mb,
        "adapter_bytes": tenant.packed.weights.nbytes,
        "device": choose_device(settings.device).type,
        "memory": "PSS of the server and its stubs: mapped is files in the page cache, private is the rest; pages of a bank "
        "file that the system keeps after a read do not count, because the system frees them when needed",
    }
    return Report("memory", result_settings, rows, goals(per_tenant["device_bytes"], last))


def draw(picture: Path, rows: Sequence[Mapping[str, Any]], shape: Shape) -> None:
    """Draw the memory of all processes of the server by number of tenants."""
    counts = [float(row["tenants"]) for row in rows]
    kinds = {
        "processes, mapped files included": "pss_mb",
        "private memory of processes": "private_mb",
        "adapter slots on the device": "slot_mb",
    }
    line_chart(
        picture,
        {name: (counts, [row[column] for row in rows]) for name, column in kinds.items()},
        title=f"Memory of a server with all its tenants loaded, {shape}",
        x_label="tenants",
        y_label="MB",
        log=True,
    )


def goals(device_bytes: float, last: Mapping[str, Any]) -> list[Goal]:
    """Return the goals on the measured growth per tenant and on the row with the most tenants."""
    text = f"{last['tenants']:,} tenants resident, all processes of the server"
    lost = last["tenants"] - last["answered"]
    return [
        Goal("memory-device", "device bytes of an added tenant", 0, device_bytes, "bytes", "lower"),
        Goal("memory-host", text, HOST_GOAL_GIB, last["pss_mb"] * 1e6 / GIB, "GiB", "lower"),
        Goal("memory-answered", "tenants that got no answer", 0, lost, "tenants", "lower"),
    ]


def _row(count: int, memory: Mapping[str, Counter[str]], on_device: int, answered: int) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for part in memory.values():
        total.update(part)  # a sum of counters would leave out zeros
    return {
        "system": "hbert",
        "tenants": count,
        "answered": answered,
        "slot_mb": on_device / 1e6,
        **{f"{kind}_mb": num_bytes / 1e6 for kind, num_bytes in total.items()},
        **{f"{name}_rss_mb": part["rss"] / 1e6 for name, part in sorted(memory.items())},
    }


def _bank(fleet: Fleet) -> BankFile:
    """Open the fleet's newest bank. A replaced bank may not be removed yet."""
    banks = Store(fleet.folder / "store").banks()
    newest = max(banks, key=lambda folder: (folder / artifact.MANIFEST).stat().st_mtime)
    return BankFile(newest, fleet.base.fingerprint)
