"""What the role of a key allows."""

from __future__ import annotations

import pytest

from hplm.access.roles import Right, allows, scopes_of

READ, MANAGE, ADMIN = Right("read"), Right("manage"), Right("admin")
BY_TENANT = Right("manage", by_tenant=True)


@pytest.mark.parametrize(
    ("tenant", "role", "right", "subject", "is_allowed"),
    [
        (None, "read", READ, None, True),
        (None, "read", MANAGE, None, False),
        (None, "manage", READ, None, True),
        (None, "manage", MANAGE, "films", True),
        (None, "manage", ADMIN, None, False),
        (None, "admin", READ, None, True),
        (None, "admin", ADMIN, None, True),
        (None, "infer", READ, None, False),
        ("films", "manage", BY_TENANT, "films", True),
        ("films", "manage", BY_TENANT, None, True),
        ("films", "manage", BY_TENANT, "news", False),
        ("films", "manage", READ, "films", False),
        ("films", "admin", READ, "films", False),
        ("films", "infer", BY_TENANT, "films", False),
    ],
)
def test_a_role_allows_its_manage_requests_alone(
    tenant: str | None, role: str, right: Right, subject: str | None, is_allowed: bool
) -> None:
    assert allows(role, tenant, right, subject) == is_allowed


def test_a_manage_key_includes_infer() -> None:
    assert scopes_of("manage") == ("infer", "manage")
    assert scopes_of("infer") == ("infer",)
