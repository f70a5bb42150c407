"""The configuration of HAProxy before the nodes of a plan.

HAProxy sends the requests of a tenant to one of the nodes that hold its base, by a consistent hash of the header
`hplm-tenant`. If that node has too much of the load, the next node on the ring gets the request. A request without the header
goes to any node that holds the base. HAProxy knows the base by the model that the request calls. A request to a model for all
bases (`hplm`, `cascade`) names no base, so there HAProxy knows the base by the tenant, from a file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hplm.core.roles import CALLING, MANAGER
from hplm.placement.plan import TenantRule

CONFIG_FILE = "haproxy.cfg"
# Maps that the configuration names: from a model of a base, a tenant or a hot tenant to its pool of nodes.
BASES_FILE, TENANTS_FILE, HOT_FILE = "bases.map", "tenants.map", "hot.map"
# HAProxy's socket, as HAProxy and the shell read it: in a folder that the user who runs HAProxy can write. The proxy's port is
# in its name, because a second HAProxy on the machine would take the socket of the first.
SOCKET = "${{XDG_RUNTIME_DIR-/tmp}}/hplm-proxy-{port}.sock"
# The pool of all nodes.
ALL = "all"
# The endpoint of `hplm serve` that says whether every model answers, and that of a Triton without `hplm serve`.
HPLM_READY, TRITON_READY = "/ready", "/v2/health/ready"
# Bytes of a request that HAProxy keeps, to send it again if a node dies. A request of 64 texts of 256 tokens has 100 KB.
BUFFER_BYTES = 131_072
# A gRPC message without a model's name that fills so much of the buffer is one that does not fit.
LARGE_BYTES = BUFFER_BYTES // 2
# Bytes that two pieces of a message share, more than the field of a model's name has.
PIECE_OVERLAP = 64

_HEAD = """\
# Written by `hplm place apply`: HAProxy (2.6 or newer) before the nodes of plan.json. Check it with `haproxy -c -f {config}`.
# A further `hplm place apply` overwrites changes. For TLS, add `ssl crt FILE` to the lines `bind`; for gRPC also `alpn h2`.
global
  default-path config
  # Bytes of a request that HAProxy keeps.
  tune.bufsize {buffer}
  # For the operator, for example to drain a node. Only the user that runs HAProxy can use the socket.
  stats socket "{socket}" mode 600 level admin

defaults
  mode http
  timeout connect 2s
  timeout client 2m
  # Deadlines end requests sooner. Raise this time if requests may have longer deadlines.
  timeout server 2m
  timeout http-request 30s
  timeout check 5s
  # An infer request changes nothing, so one other node may answer it again. HAProxy needs the whole request for that. With more
  # retries, one request that ends a Triton could end several.
  option http-buffer-request
  retries 1
  option redispatch 1
  retry-on conn-failure empty-response
  default-server inter 1s fall 2 rise 1
"""

_HTTP_FRONTEND = """
# Clients: http://HOST:{port}. Only requests for answers pass: the manager is asked at a node itself.
frontend http
  bind {host}:{port}
  acl is_health path /v2/health/live /v2/health/ready
  acl is_model path_reg ^/v2/models/({models})(/(infer|ready))?$
  http-request deny deny_status 404 unless is_health || is_model
  http-request set-var(txn.pool) str({all})
  http-request set-var(txn.pool) path,field(4,/),map_str({bases},{all}) if is_model
"""

_GRPC_FRONTEND = """
# Clients: grpc://HOST:{port}. The model's name is the first field of a message.
frontend grpc
  bind {host}:{port} proto h2
  acl is_health path /inference.GRPCInferenceService/ServerLive /inference.GRPCInferenceService/ServerReady
  acl is_model path /inference.GRPCInferenceService/ModelInfer
  acl is_model path /inference.GRPCInferenceService/ModelReady /inference.GRPCInferenceService/ModelMetadata
  http-request deny deny_status 404 unless is_health || is_model
  http-request set-var(txn.model) req.body,ungrpc(1) if is_model
  # HAProxy reads a model only in a message that it keeps whole.
  http-request deny deny_status 413 if is_model !{{ var(txn.model) -m found }} {{ req.body_len ge {large} }}
  acl is_known var(txn.model) -m reg ^({models})$
  http-request deny deny_status 403 if is_model !is_known
  # If a message names two models, HAProxy reads the first and Triton the last. These find the manager at any place.
{managing}
  http-request deny deny_status 403 if is_model is_managing
  http-request set-var(txn.pool) str({all})
  http-request set-var(txn.pool) var(txn.model),map_str({bases},{all}) if is_model
"""

_CHOICE = """\
  http-request set-var(txn.pool) req.hdr(hplm-tenant),map_str({tenants},{all}) if {{ var(txn.pool) -m str {all} }}
  acl is_hot req.hdr(hplm-tenant),map_str({hot}) -m found
  http-request set-var(txn.pool) req.hdr(hplm-tenant),map_str({hot}) if is_hot
  use_backend {protocol}.%[var(txn.pool)]
"""


@dataclass(frozen=True)
class ProxiedNode:
    """A node before which the proxy stands. `bases`: the models by which clients call the bases of the node.

    `number` is the place of the node in its plan, from 1 on: HAProxy's hash of tenants depends on it.
    """

    name: str
    number: int
    host: str
    http_port: int
    grpc_port: int
    health_port: int
    bases: Collection[str]


@dataclass(frozen=True)
class ProxyAddress:
    """The address on which the proxy listens, with a port for HTTP and a port for gRPC."""

    host: str = "127.0.0.1"
    http_port: int = 8080
    grpc_port: int = 8081

    @property
    def socket(self) -> str:
        """The path of the socket at which the operator drains nodes, with a variable that HAProxy and the shell replace."""
        return SOCKET.format(port=self.http_port)

    @property
    def client_urls(self) -> tuple[str, str]:
        """The addresses that clients use, over HTTP and gRPC, from the machine of the proxy if it listens on all addresses."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{in_url(host)}:{self.http_port}", f"grpc://{in_url(host)}:{self.grpc_port}"


def in_url(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class Pool:
    """Nodes that may answer the same requests.

    `by_tenant`: each tenant has a node of its own in the pool. Otherwise the node with the fewest requests answers.
    """

    name: str
    nodes: tuple[ProxiedNode, ...]
    by_tenant: bool = True


def proxy_files(
    nodes: Sequence[ProxiedNode],
    base_of_tenant: Mapping[str, str],
    rule: TenantRule,
    listen: ProxyAddress,
    health_path: str = HPLM_READY,
) -> dict[str, str]:
    """Return the text of each file of the proxy's configuration, by its name.

    `base_of_tenant` has the model of each tenant's base. Without a tenant in it, a request to a model for all bases goes to any
    node.
    """
    bases = sorted({base for node in nodes for base in node.bases})
    everywhere = {base for base in bases if all(base in node.bases for node in nodes)}
    pools = [Pool(ALL, tuple(nodes))]
    pools += [Pool(f"base.{base}", tuple(node for node in nodes if base in node.bases)) for base in bases]
    hot = {tenant: tuple(sorted(keepers)) for tenant, keepers in rule.hot.items()}
    names = {keepers: f"hot.{number}" for number, keepers in enumerate(sorted(set(hot.values())), 1)}
    pools += [
        Pool(name, tuple(node for node in nodes if node.name in keepers), by_tenant=False)
        for keepers, name in names.items()
    ]
    models = "|".join([*bases, *CALLING]).replace(".", r"\.")
    values: dict[str, object] = {
        "models": models,
        "all": ALL,
        "bases": BASES_FILE,
        "tenants": TENANTS_FILE,
        "hot": HOT_FILE,
    }
    values |= {"large": LARGE_BYTES, "managing": _managing_rules()}
    parts = [_HEAD.format(config=CONFIG_FILE, buffer=BUFFER_BYTES, socket=listen.socket)]
    for protocol, frontend, port in (
        ("http", _HTTP_FRONTEND, listen.http_port),
        ("grpc", _GRPC_FRONTEND, listen.grpc_port),
    ):
        parts.append(frontend.format(host=in_url(listen.host), port=port, **values))
        parts.append(_CHOICE.format(protocol=protocol, **values))
    parts += [_backend(protocol, pool, rule, health_path) for pool in pools for protocol in ("http", "grpc")]
    # A base that every node holds needs no look-up by tenant, so that new tenants need no new file.
    placed = {tenant: base for tenant, base in base_of_tenant.items() if base in bases and base not in everywhere}
    return {
        CONFIG_FILE: "".join(parts),
        BASES_FILE: _map({base: f"base.{base}" for base in bases}),
        TENANTS_FILE: _map({tenant: f"base.{base}" for tenant, base in placed.items()}),
        HOT_FILE: _map({tenant: names[keepers] for tenant, keepers in hot.items()}),
    }


def _backend(protocol: str, pool: Pool, rule: TenantRule, health_path: str) -> str:
    lines = [f"\nbackend {protocol}.{pool.name}"]
    if pool.by_tenant:
        lines += ["balance hdr(hplm-tenant)", "hash-type consistent", f"hash-balance-factor {rule.load_factor}"]
    else:
        lines += ["balance leastconn"]
    lines += [f"option httpchk GET {health_path}", "http-check expect status 200"]
    for node in pool.nodes:
        address = f"{in_url(node.host)}:{node.http_port if protocol == 'http' else node.grpc_port}"
        weight = rule.weights.get(node.name, 1)
        over_h2 = " proto h2 check-proto h1" if protocol == "grpc" else ""
        lines.append(
            f"server {node.name} {address} id {node.number} weight {weight} check port {node.health_port}{over_h2}"
        )
    return "\n  ".join(lines) + "\n"


def _managing_rules() -> str:
    """Return the rules that find the manager in a gRPC message.

    HAProxy matches bytes as hex digits, and as many as fit a buffer. So the rules match pieces, which overlap.
    """
    pattern = _first_field(MANAGER.name)
    starts = range(0, BUFFER_BYTES, LARGE_BYTES - 2 * PIECE_OVERLAP)
    length = LARGE_BYTES - PIECE_OVERLAP
    return "\n".join(
        f"  acl is_managing req.body,bytes({start},{length}),hex -m reg -i ({pattern})" for start in starts
    )


def _first_field(name: str) -> str:
    """Return a regular expression, in hex digits, of field 1 of a gRPC message with a value: tag, length, value.

    Tag and length may have more bytes than they need.
    """
    tag, length = (f"({number:02x}|{0x80 | number:02x}([89a-f].){{0,8}}[0-7].)" for number in (0x0A, len(name)))
    return f"{tag}{length}{name.encode().hex()}"


def _map(values: Mapping[str, str]) -> str:
    return "".join(f"{key} {value}\n" for key, value in sorted(values.items()))
