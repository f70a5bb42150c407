"""The registry against a plain dictionary, over any order of calls."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hplm.errors import ConflictError, DomainInUseError, UnknownVersionError
from hplm.registry.records import DomainVersion
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.registry.making import NOW_S, publish, publish_branch, publish_root

NAMES = st.sampled_from(["a", "b", "c"])
DOMAINS = st.sampled_from(["law", "tax"])


class RegistryMachine(RuleBasedStateMachine):
    """`kept`: a tenant's versions and their domain version; `current`: what is served; `last`: its versions, served last at
    the end; `published`: kept domain versions."""

    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        shutil.copy(self.template, self.folder / "registry.sqlite")
        self.registry = Registry.open(Store(self.folder))
        self.root = self.registry.domain_versions("b", "general")[0]
        self.kept: dict[str, dict[int, int]] = {}
        self.current: dict[str, int] = {}
        self.last: dict[str, list[int]] = {}
        self.domains: dict[str, DomainVersion] = {}
        self.published: dict[int, DomainVersion] = {}
        self.seen = self.registry.changes_since(0)
        self.served = {one.name: one.number for one in self.seen.published}

    def teardown(self) -> None:
        self.registry.close()
        shutil.rmtree(self.folder)

    @rule(name=DOMAINS)
    def publish_domain(self, name: str) -> None:
        made = publish_branch(self.registry, name, self.root)
        self.domains[name] = self.published[made.id] = made

    @rule(name=NAMES, domain=DOMAINS)
    def publish_tenant(self, name: str, domain: str) -> None:
        over = self.domains.get(domain, self.root)
        made = publish(self.registry, name, over, self.current.get(name))
        assert made.number not in self.kept.get(name, {})
        self.kept.setdefault(name, {})[made.number] = over.id
        self.serve(name, made.number)

    def serve(self, name: str, number: int) -> None:
        self.current[name] = number
        self.last[name] = [one for one in self.last.get(name, []) if one != number] + [number]

    @rule(name=NAMES, wrong=st.integers(50, 60))
    def publish_what_was_overtaken(self, name: str, wrong: int) -> None:
        with pytest.raises(ConflictError):
            publish(self.registry, name, self.root, wrong)

    @precondition(lambda self: self.current)
    @rule(data=st.data(), number=st.none() | st.integers(1, 8))
    def rollback(self, data: st.DataObject, number: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.current)))
        earlier = [one for one in self.last[name] if one in self.kept[name] and one < self.current[name]]
        wanted = (earlier[-1] if earlier else None) if number is None else number
        if wanted in self.kept[name]:
            assert self.registry.rollback_tenant(name, number, NOW_S)["b"].number == wanted
            self.serve(name, wanted)
        else:
            with pytest.raises(UnknownVersionError):
                self.registry.rollback_tenant(name, number, NOW_S)

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def delete_tenant(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.current)))
        self.registry.delete_tenant(name, NOW_S)
        del self.current[name], self.kept[name], self.last[name]

    @precondition(lambda self: self.domains)
    @rule(data=st.data())
    def delete_domain(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.domains)))
        ids = {one.id for one in self.published.values() if one.domain == name}
        users = sorted(tenant for tenant, number in self.current.items() if self.kept[tenant][number] in ids)
        if users:
            with pytest.raises(DomainInUseError, match=f"tenants {', '.join(users)}$"):
                self.registry.delete_domain("b", name, NOW_S)
            return
        self.registry.delete_domain("b", name, NOW_S)
        del self.domains[name]
        self.published = {one: version for one, version in self.published.items() if one not in ids}
        for versions in self.kept.values():
            for number in [number for number, domain_id in versions.items() if domain_id in ids]:
                del versions[number]

    @rule(keep=st.integers(1, 3))
    def retire(self, keep: int) -> None:
        self.registry.retire(keep, NOW_S, base="b")
        for name, versions in self.kept.items():
            stay = [one for one in self.last[name] if one in versions][-keep:]
            self.kept[name] = {n: d for n, d in versions.items() if n in stay}
        pinned = {domain_id for versions in self.kept.values() for domain_id in versions.values()}
        for name in ("law", "tax"):
            ids = sorted(one.id for one in self.published.values() if one.domain == name)
            for gone in ids[:-keep]:
                if gone not in pinned:
                    del self.published[gone]

    @rule()
    def collect(self) -> None:
        for path in self.registry.collectable(NOW_S + 1):
            self.registry.forget(path)

    @invariant()
    def the_registry_says_what_the_model_says(self) -> None:
        assert {one.name: one.current.number for one in self.registry.tenants()} == self.current
        for name in self.current:
            found = {one.number: one.domain_version_id for one in self.registry.tenant_versions(name)}
            assert found == self.kept[name]
        for name in self.domains:
            ids = {one.id for one in self.published.values() if one.domain == name}
            assert {one.id for one in self.registry.domain_versions("b", name)} == ids
        # Everything kept still has its files.
        live = {one.path for one in self.published.values()} | {
            f"tenants/{name}/{number}" for name, versions in self.kept.items() for number in versions
        }
        assert not live & set(self.registry.collectable(NOW_S + 1))
        assert live <= self.registry.snapshot().paths

    @invariant()
    def a_follower_that_hears_only_of_changes_knows_what_is_served(self) -> None:
        changes = self.registry.changes_since(self.seen.generation)
        self.served |= {one.name: one.number for one in changes.published}
        for name in (one.name for one in changes.withdrawn):
            self.served.pop(name, None)
        assert self.served == self.current
        self.seen = changes


def test_the_registry_does_what_a_dictionary_would(tmp_path: Path) -> None:
    registry = Registry.open(Store(tmp_path), create=True)
    publish_root(registry)
    registry.close()

    class Machine(RegistryMachine):
        template = tmp_path / "registry.sqlite"

    Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
    Machine.TestCase("runTest").debug()
