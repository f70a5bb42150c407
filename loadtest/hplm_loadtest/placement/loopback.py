"""Starts the nodes of an applied plan on this machine: one `hplm serve` a node, on free ports of 127.0.0.1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import ConfigError
from hplm.placement.plan import Plan
from hplm_loadtest.benchmarks.serve_process import ServeProcess, serving

# The folder of a node's model repository, below the node's folder in the folder that `hplm place apply` writes.
MODELS = "models"


@dataclass(frozen=True)
class NodeServer:
    """A node of a plan that runs on this machine. `process` can be killed and started again."""

    name: str
    process: ServeProcess

    @property
    def http_port(self) -> int:
        return self.process.ports.http

    @property
    def grpc_port(self) -> int:
        return self.process.ports.grpc

    @property
    def health_port(self) -> int:
        """The port on which `/ready` says whether all models of the node answer."""
        port = self.process.ports.health
        assert port is not None, "free_ports gives a health port"
        return port

    @property
    def grpc_url(self) -> str:
        return self.process.ports.grpc_url


def used_nodes(plan: Plan) -> list[str]:
    """Return the names of the nodes that have a group with bases, in the plan's order."""
    used = {group.node for group in plan.groups if group.bases}
    return [node.name for node in plan.nodes if node.name in used]


@contextmanager
def serve_plan(plan: Plan, folder: Path, *, log: Path, flags: Sequence[str] = ()) -> Iterator[list[NodeServer]]:
    """Serve each node that has bases, and yield the servers when all models answer; stop them when the block ends.

    `folder` is what `hplm place apply` wrote: NODE/models is a model repository. The folder `log` gets a folder of logs for
    each node. `flags` are further options of `hplm serve`. Raises ConfigError if a repository is missing, StartError if a
    server does not start.
    """
    repositories = {name: folder / name / MODELS for name in used_nodes(plan)}
    for name, models in repositories.items():
        if not models.is_dir():
            raise ConfigError(
                f"{models}: the model repository of node {name!r} was expected: run `hplm place apply` with this plan again"
            )
    with ExitStack() as stack:
        servers = []
        for name, models in repositories.items():
            (logs := log / name).mkdir(parents=True, exist_ok=True)
            servers.append(NodeServer(name, stack.enter_context(serving(models, logs, flags))))
        yield servers


def addresses(plan: Plan, servers: Sequence[NodeServer]) -> Mapping[str, list[str]]:
    """Return the gRPC addresses of the nodes that serve each base of a plan: what `replay` sends to without a proxy."""
    url_of = {server.name: server.grpc_url for server in servers}
    urls: dict[str, list[str]] = {}
    for group in plan.groups:
        for planned in group.bases:
            if url_of[group.node] not in urls.setdefault(planned.base, []):
                urls[planned.base].append(url_of[group.node])
    return urls
