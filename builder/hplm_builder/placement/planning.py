"""Makes a plan: measured bases, the search, the smallest number of devices, and where tenants are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hplm.errors import ConfigError
from hplm.models import base_folder
from hplm.placement.cluster import Cluster
from hplm.placement.live_simulation import simulate_live
from hplm.placement.measured import outside_s, served_model
from hplm.placement.plan import Assumptions, Plan, TenantRule
from hplm.placement.search.enumeration import SearchOptions, SearchResult, search
from hplm.placement.search.fewest_devices import fewest_devices
from hplm.placement.search.robust import covers_every_model, survives_any_node
from hplm.placement.search.scores import in_windows
from hplm.placement.search.tenants import TenantLoad, place_tenants
from hplm.placement.served_model import ServedModel
from hplm.placement.stage_times import StageTimes
from hplm.profiles.profile import Profile
from hplm.profiles.profile_store import read_profiles
from hplm.workloads.model_requests import ModelRequests
from hplm_builder.placement.apply_plan import Source
from hplm_builder.placement.cluster_file import Nodes
from hplm_builder.placement.plan_build import bases_of_nodes, make_plan, nodes_of, with_one_cut
from hplm_builder.placement.planned_workload import planned_requests

# Called with a sentence about the last step, and the done share of all steps.
Progress = Callable[[str, float], None]
# Requests of a prediction with live queues, at most: they take seconds.
MOST_LIVE_REQUESTS = 100_000


@dataclass(frozen=True)
class MeasuredBases:
    """The bases of a repository as placement sees them, and by base: a tenant's bytes, and the time outside of the stages."""

    models: tuple[ServedModel, ...]
    adapter_bytes: Mapping[str, int]
    outside_ms: dict[str, float]
    warnings: tuple[str, ...] = ()


def measured_bases(source: Source, names: Sequence[str], tokens: int, hop_s: float, nodes: Nodes) -> MeasuredBases:
    """Return bases of a repository by their newest full profile. Raises ConfigError if a base has no profile.

    `tokens` is the length of a usual text, `hop_s` the seconds from a stage to the next.
    """
    models, adapter_bytes, outside_ms, warnings = [], {}, {}, []
    for name in names:
        base = source.base(name)
        profile = _newest_profile(source, base.base, name)
        hidden_size = base_folder.read(source.store.base(base.base), verify=False).config.hidden_size
        model = replace(served_model(profile, tokens, hidden_size=hidden_size, hop_s=hop_s), name=name)
        models.append(model)
        adapter_bytes[name] = profile.memory.adapter
        outside_ms[name] = round(1000 * outside_s(profile, tokens), 3)
        warnings += _differences(name, profile, nodes)
    return MeasuredBases(tuple(models), adapter_bytes, outside_ms, tuple(warnings))


def plan_placement(
    measured: MeasuredBases,
    nodes: Nodes,
    assumed: Assumptions,
    options: SearchOptions,
    tenants: Sequence[TenantLoad],
    progress: Progress,
) -> Plan:
    """Search for the placement with the most requests in time, and return its plan."""
    requests = planned_requests(assumed)
    result = _searched(measured.models, nodes.cluster(), requests, options, progress)
    placement = with_one_cut(result.placement, nodes)
    cluster, names = nodes.cluster(), [model.name for model in measured.models]
    if options.required_nodes and not covers_every_model(placement, names):
        raise ConfigError("no placement was found in which every node serves a base with one cut: give --max-stages 1")
    survives = len(nodes.nodes) > 1 and survives_any_node(placement, cluster, names)
    if options.survive_any_node and not survives:
        raise ConfigError(
            "no placement was found that survives the loss of any node with one cut of a base on each node: give --max-stages 1"
        )
    # The search's compiled model follows the paper. The prediction has the queues of the live server.
    sample = in_windows(requests, MOST_LIVE_REQUESTS)
    outcomes = simulate_live(placement, StageTimes(cluster, measured.models), sample)
    algorithm = f"{options.method} search, {result.simulations} simulations"
    plan = make_plan(
        placement,
        nodes,
        measured.models,
        outcomes,
        assumed,
        tenants=TenantRule(),
        algorithm=algorithm,
        survives_any_node=survives,
    )
    return replace(plan, tenants=_tenant_rule(plan, tenants))


def fewest_nodes(
    target: float,
    measured: MeasuredBases,
    nodes: Nodes,
    assumed: Assumptions,
    options: SearchOptions,
    progress: Progress,
) -> Nodes:
    """Return the fewest first devices of all nodes with which the share of requests in time is `target` or more.

    Raises ConfigError if all devices do not suffice.
    """

    def find(
        models: Sequence[ServedModel], cluster: Cluster, requests: ModelRequests, options: SearchOptions | None = None
    ) -> SearchResult:
        return _searched(models, cluster, requests, options, progress)

    found = fewest_devices(
        measured.models,
        lambda devices: nodes.first(devices).cluster(),
        planned_requests(assumed),
        target,
        options,
        most_devices=nodes.cluster().devices,
        find=find,
    )
    return nodes.first(found.devices)


def search_options(most_stages: int, *, survive_any_node: bool) -> SearchOptions:
    """Return the options of a search for real nodes: every base is placed, and no layer is divided among devices."""
    return SearchOptions(
        most_stages=most_stages, most_intra=1, cover_every_model=True, survive_any_node=survive_any_node
    )


def tenant_loads(
    source: Source, measured: MeasuredBases, rates: Mapping[str, float], tenant_rates: Mapping[str, float]
) -> list[TenantLoad]:
    """Return the load of each tenant of the placed bases. A tenant without a rate has an equal share of its base's rest."""
    of_base: dict[str, list[str]] = {name: [] for name in rates}
    for tenant, base in source.model_of_tenant().items():
        if base in of_base:
            of_base[base].append(tenant)
    if unknown := set(tenant_rates) - {tenant for tenants in of_base.values() for tenant in tenants}:
        raise ConfigError(f"tenants of the placed bases were expected, got a rate of {sorted(unknown)[0]!r}")
    loads = []
    for base, tenants in of_base.items():
        without = [tenant for tenant in tenants if tenant not in tenant_rates]
        rest = max(0.0, rates[base] - sum(tenant_rates.get(tenant, 0.0) for tenant in tenants))
        for tenant in sorted(tenants):
            rate = tenant_rates.get(tenant, rest / max(1, len(without)))
            loads.append(TenantLoad(tenant, base, rate, measured.adapter_bytes[base]))
    return loads


def _searched(
    models: Sequence[ServedModel],
    cluster: Cluster,
    requests: ModelRequests,
    options: SearchOptions | None,
    progress: Progress,
) -> SearchResult:
    def report(done: int, steps: int, said: str) -> None:
        progress(f"{cluster.devices} devices: {said}", done / steps)

    return search(models, cluster, requests, options, progress=report)


def _tenant_rule(plan: Plan, tenants: Sequence[TenantLoad]) -> TenantRule:
    nodes_of_base: dict[str, list[str]] = {}
    for node, bases in bases_of_nodes(plan).items():
        for base in bases:
            nodes_of_base.setdefault(base, []).append(node)
    served = [tenant for tenant in tenants if tenant.base in nodes_of_base]
    if not served:
        return TenantRule()
    return place_tenants(served, nodes_of(plan).cluster().nodes, nodes_of_base)


def _newest_profile(source: Source, base: str, name: str) -> Profile:
    for profile in read_profiles(source.store, base):
        if profile.kind == "full":
            return profile
    raise ConfigError(
        f"base {name!r} has no full profile in {source.store.root}: measure it with "
        f"`hplm profile --models {source.models} --name {name}`"
    )


def _differences(name: str, profile: Profile, nodes: Nodes) -> list[str]:
    """Return sentences about devices that differ from those of the profile."""
    conditions = profile.conditions
    found = []
    for node in nodes.nodes:
        if node.gpus and conditions.device == "cpu":
            found.append(f"{name} was measured on a CPU, and node {node.name} has GPUs")
        if node.cores and conditions.device != "cpu":
            found.append(f"{name} was measured on {conditions.device}, and node {node.name} has cores")
        elif node.cores and (cores := len(node.cores[0])) != conditions.threads:
            found.append(
                f"{name} was measured with {conditions.threads} threads, and a device of node {node.name} has {cores} cores"
            )
    return found
