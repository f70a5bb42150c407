"""The ports of a server."""

from __future__ import annotations

import errno
import random
import socket
from dataclasses import dataclass

from hplm.errors import StartError

# Below the ports that the system gives to clients: one of those might be taken before Triton has it.
PORTS = range(10_000, 32_768)


@dataclass(frozen=True)
class Ports:
    """The ports of a server on `host`: three of Triton, and that of the health endpoint of `hplm serve` if it has one.

    `has_grpc_tls`: Triton's options ask for TLS over gRPC.
    """

    http: int
    grpc: int
    metrics: int
    host: str = "127.0.0.1"
    health: int | None = None
    has_grpc_tls: bool = False

    @property
    def http_url(self) -> str:
        return f"http://{self.url_host}:{self.http}"

    @property
    def grpc_url(self) -> str:
        return f"grpc{'s' * self.has_grpc_tls}://{self.url_host}:{self.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.url_host}:{self.metrics}/metrics"

    @property
    def health_url(self) -> str:
        return f"http://{self.url_host}:{self.health}"

    @property
    def url_host(self) -> str:
        """The host as a URL has it: an IPv6 address is in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host


def free_ports() -> Ports:
    """Return four ports on which nothing listens now. Raises StartError if there are none."""
    free: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((Ports.host, port))
            except OSError:
                continue
        free.append(port)
        if len(free) == 4:
            http, grpc, metrics, health = free
            return Ports(http, grpc, metrics, health=health)
    raise StartError(f"there are no free ports on {Ports.host} below {PORTS.stop}")


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of a listening address: IPv6 for an address with colons, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listening_address(host: str) -> str:
    """Return the address of a host, which may be a name, because Triton listens on addresses alone. Raises StartError."""
    if "%" in host:
        raise StartError(f"--host: Triton cannot listen on an address with a zone, got {host!r}: give another address")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StartError(
            f"--host: an address or a name of this machine was expected, got {host!r} "
            f"({getattr(error, 'strerror', None) or error})"
        ) from None
    # IPv4 first, because clients that are given a name often have no IPv6.
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def check_free(ports: Ports) -> None:
    """Check that a server can listen on the ports.

    Raises StartError if a port is taken or named twice, or if the host is no address of this machine.
    """
    by_flag = {"--http-port": ports.http, "--grpc-port": ports.grpc, "--metrics-port": ports.metrics}
    if ports.health is not None:
        by_flag["--health-port"] = ports.health
    if len({*by_flag.values()}) < len(by_flag):
        raise StartError(f"{', '.join(by_flag)} must be different ports, got {', '.join(map(str, by_flag.values()))}")
    for flag, port in by_flag.items():
        with socket.socket(family_of(ports.host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ports.host, port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise StartError(
                        f"{ports.host} is no address of this machine ({error.strerror}): see --host"
                    ) from None
                raise StartError(
                    f"port {port} of {ports.host} is not free ({error.strerror}); choose another with {flag}"
                ) from None
