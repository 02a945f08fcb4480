"""What is learned is kept for each tenant, and not for names without end."""

from sglang_patches.ledger.rates import MOST_TENANTS, per_tenant


def test_each_tenant_has_its_own_and_keeps_it():
    of = per_tenant(list)
    of("a").append(1)
    assert (of("a"), of("b"), of("")) == ([1], [], [])


def test_the_tenant_used_least_recently_is_forgotten():
    of = per_tenant(list)
    of("steady").append(1)
    of("gone").append(1)
    for other in range(2 * MOST_TENANTS):
        of(f"other {other}")
        of("steady")
    assert (of("steady"), of("gone")) == ([1], [])
