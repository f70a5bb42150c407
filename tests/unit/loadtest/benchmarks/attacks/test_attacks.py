"""Requests of attacks: what is right before it is changed, and what the changes leave."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hplm_loadtest.benchmarks.attacks.example_proxy import EXAMPLE, Proxy, filled_in
from hplm_loadtest.benchmarks.attacks.manage_requests import ACTIONS, manage_request
from hplm_loadtest.benchmarks.attacks.mutations import Pairs, Raw, mutated, to_json
from hplm_loadtest.benchmarks.attacks.near_misses import CHANGES, near_miss

from hplm.access.keys import new_key
from hplm.errors import BadManageRequestError, ConfigError
from hplm.manage.requests import OfJob, parse_request
from hplm.manage.rights import WATCH
from hplm.manage.service import ManageService
from hplm.triton.launcher.ports import Ports

ROOT = Path(__file__).parents[5]
KINDS = {**ManageService.REQUESTS, WATCH: OfJob}
FILLED_IN = ("listen ", "server 127", "ssl_certificate", "access_log", "http {")


def test_most_manage_requests_of_every_action_are_well_formed_before_they_are_changed() -> None:
    rng = random.Random(1)
    parsed: dict[str, int] = dict.fromkeys(ACTIONS, 0)
    for _ in range(2000):
        request = manage_request(rng, ["victim"], ["tiny"])
        try:
            parsed[parse_request(to_json(request), KINDS)[0]] += 1
        except BadManageRequestError:
            # Some fields exclude each other.
            continue
    assert min(parsed.values()) > 10


def test_nearly_every_change_of_a_value_is_seen_in_its_json() -> None:
    value = {"action": "tenant.show", "tenant": "films", "levels": ["a", "b"], "limit": 3}
    rng = random.Random(1)
    assert sum(to_json(mutated(value, rng)) != to_json(value) for _ in range(500)) > 480


def test_json_has_repeated_keys_and_raw_bytes_as_they_are() -> None:
    value = Pairs((("a", 1), ("a", [Raw(b"NaN"), "text"])))
    assert to_json(value) == b'{"a":1,"a":[NaN,"text"]}'
    plain = {"a": [1, None, True, {"b": 0.5}]}
    assert json.loads(to_json(plain)) == plain


def test_no_near_miss_is_the_key_and_each_change_occurs() -> None:
    rng, names = random.Random(1), set()
    for _ in range(1000):
        key = new_key().text()
        name, wrong = near_miss(key, rng)
        assert wrong != key
        names.add(name)
    assert names == set(CHANGES)


def test_the_example_proxy_keeps_its_rules_when_ports_and_paths_are_filled_in(tmp_path: Path) -> None:
    proxy = Proxy(18443, 18444, tmp_path / "certificate.pem", tmp_path)
    example = (ROOT / EXAMPLE).read_text()
    made = filled_in(example, Ports(18000, 18001, 18002), proxy, tmp_path / "key.pem", [18402, 18403])
    changed = [line for line in example.splitlines() if line not in made.splitlines()]
    assert changed
    assert all(any(word in line for word in FILLED_IN) for line in changed)
    assert not any(old in made for old in (":8000;", ":8001;", ":8402", "listen 443"))
    with pytest.raises(ConfigError, match="expected to have one line"):
        filled_in(example.replace("listen 443 ssl;", ""), Ports(1, 2, 3), proxy, tmp_path, [])
