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
BASES = st.sampled_from(["b", "c"])


class RegistryMachine(RuleBasedStateMachine):
    """`kept`: a tenant's versions and their domain version; `current`: what is served by base; `default`: a tenant's base;
    `last`: its versions, served last at the end; `published`: kept domain versions of base `b`. Base `c` has a root only."""

    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        shutil.copy(self.template, self.folder / "registry.sqlite")
        self.registry = Registry.open(Store(self.folder))
        self.root = self.registry.domain_versions("b", "general")[0]
        self.other = self.registry.domain_versions("c", "other")[0]
        self.kept: dict[str, dict[int, int]] = {}
        self.current: dict[str, dict[str, int]] = {}
        self.default: dict[str, str] = {}
        self.last: dict[str, list[int]] = {}
        self.domains: dict[str, DomainVersion] = {}
        self.published: dict[int, DomainVersion] = {}
        self.seen = self.registry.changes_since(0)
        self.served = {(one.name, one.base): one.number for one in self.seen.published}

    def teardown(self) -> None:
        self.registry.close()
        shutil.rmtree(self.folder)

    @rule(name=DOMAINS)
    def publish_domain(self, name: str) -> None:
        made = publish_branch(self.registry, name, self.root)
        self.domains[name] = self.published[made.id] = made

    @rule(name=NAMES, domain=DOMAINS, base=BASES)
    def publish_tenant(self, name: str, domain: str, base: str) -> None:
        over = self.domains.get(domain, self.root) if base == "b" else self.other
        made = publish(self.registry, name, over, self.current.get(name, {}).get(base))
        assert made.number not in self.kept.get(name, {})
        self.kept.setdefault(name, {})[made.number] = over.id
        self.last.setdefault(name, []).append(made.number)
        self.serve(name, {**self.current.get(name, {}), base: made.number})

    def serve(self, name: str, state: dict[str, int]) -> None:
        self.current[name] = state
        if self.default.get(name) not in state:
            self.default[name] = min(state)

    def base_of(self, name: str, number: int) -> str:
        return "c" if self.kept[name][number] == self.other.id else "b"

    def of_base(self, name: str, base: str) -> list[int]:
        """The kept versions over a base, served last at the end."""
        return [one for one in self.last[name] if one in self.kept[name] and self.base_of(name, one) == base]

    @rule(name=NAMES, wrong=st.integers(50, 60))
    def publish_what_was_overtaken(self, name: str, wrong: int) -> None:
        with pytest.raises(ConflictError):
            publish(self.registry, name, self.root, wrong)

    @precondition(lambda self: self.current)
    @rule(data=st.data(), number=st.none() | st.integers(1, 8))
    def rollback(self, data: st.DataObject, number: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.current)))
        if number is None:
            base, newest = max(self.current[name].items(), key=lambda item: item[1])
            wanted = {each: one for each, one in self.current[name].items() if each != base}
            if earlier := [one for one in self.of_base(name, base) if one < newest]:
                wanted[base] = earlier[-1]
        else:
            up_to = {base: [one for one in self.of_base(name, base) if one <= number] for base in ("b", "c")}
            wanted = {base: max(found) for base, found in up_to.items() if found and number in self.kept[name]}
        if wanted:
            served = self.registry.rollback_tenant(name, number, NOW_S)
            assert {base: version.number for base, version in served.items()} == wanted
            again = sorted(wanted.values())
            self.last[name] = [one for one in self.last[name] if one not in again] + again
            self.serve(name, wanted)
        else:
            with pytest.raises(UnknownVersionError):
                self.registry.rollback_tenant(name, number, NOW_S)

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def delete_tenant(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.current)))
        self.registry.delete_tenant(name, NOW_S)
        del self.current[name], self.kept[name], self.last[name], self.default[name]

    @precondition(lambda self: any(len(bases) > 1 for bases in self.current.values()))
    @rule(data=st.data(), base=BASES)
    def delete_tenant_over_a_base(self, data: st.DataObject, base: str) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, bases in self.current.items() if len(bases) > 1)))
        self.registry.delete_tenant(name, NOW_S, base=base)
        for number in self.of_base(name, base):
            del self.kept[name][number]
        self.serve(name, {each: number for each, number in self.current[name].items() if each != base})

    @precondition(lambda self: self.domains)
    @rule(data=st.data())
    def delete_domain(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.domains)))
        ids = {one.id for one in self.published.values() if one.domain == name}
        users = sorted(
            tenant for tenant, bases in self.current.items() if "b" in bases and self.kept[tenant][bases["b"]] in ids
        )
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

    @rule(keep=st.integers(1, 3), base=BASES)
    def retire(self, keep: int, base: str) -> None:
        self.registry.retire(keep, NOW_S, base=base)
        for name, versions in self.kept.items():
            for number in self.of_base(name, base)[:-keep]:
                del versions[number]
        if base == "c":
            return
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
        listed = self.registry.tenants()
        assert {one.name: one.bases for one in listed} == self.current
        assert {one.name: (one.base, one.current.number) for one in listed} == {
            name: (self.default[name], bases[self.default[name]]) for name, bases in self.current.items()
        }
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
        self.served |= {(one.name, one.base): one.number for one in changes.published}
        for one in changes.withdrawn:
            self.served.pop((one.name, one.base), None)
        assert self.served == {
            (name, base): number for name, bases in self.current.items() for base, number in bases.items()
        }
        assert all(one.is_default == (self.default[one.name] == one.base) for one in changes.published)
        self.seen = changes


def test_the_registry_does_what_a_dictionary_would(tmp_path: Path) -> None:
    registry = Registry.open(Store(tmp_path), create=True)
    publish_root(registry)
    publish_root(registry, "other", base="c")
    registry.close()

    class Machine(RegistryMachine):
        template = tmp_path / "registry.sqlite"

    Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
    Machine.TestCase("runTest").debug()
