"""A model repository with other settings, for comparing them on real servers."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hplm.core.roles import ENCODE, LOOK_UP, SERVING, names
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm_loadtest.benchmarks.page_cache import into_page_cache


@contextmanager
def serving(
    models: Path, *, plot: Mapping[str, Any], upper: Mapping[str, Any], log: str = "triton-bench.log"
) -> Iterator[TritonServer]:
    """A ready server over `models` with some settings of its stages changed; the repository itself stays as it is.

    Its banks are in the page cache, and it has no models for manage requests. `log` lies beside `models`: servers at the
    same time want one each.
    """
    with tempfile.TemporaryDirectory(prefix="hplm-variant-") as folder:
        changed = Path(folder) / "models"
        for role in names(SERVING):
            shutil.copytree(models / role, changed / role)
        for role, settings in ((LOOK_UP.name, plot), (ENCODE.name, upper)):
            path = changed / role / "1" / "settings.json"
            values = json.loads(path.read_text())
            values["store"] = str((models / role / "1" / values["store"]).resolve())
            path.write_text(json.dumps({**values, **settings}))
        # Of both: they share one.
        into_page_cache(Path(values["store"]))
        with TritonServer(changed, free_ports(), log=models.parent / log, tied=True) as server:
            server.wait_ready()
            yield server
