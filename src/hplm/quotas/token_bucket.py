"""Token buckets: how much of a quota a tenant may use now. Pure; time is handed in, in seconds of any one clock."""

from __future__ import annotations

from typing import NamedTuple

# Seconds of a quota that gather beside LEAST units: time in which nobody asks, or no server settles, is lost only after that.
LEASE_S = 0.1
# Units that must be there for a use. A larger use leaves less than nothing, which the quota then makes up for.
LEAST = 1.0
# Seconds of a quota that a use may leave as a debt at most. What a larger use takes beyond that is forgiven, so that no request
# has a tenant refused for hours. A minute is longer than a request lasts, so that its corrections still find the debt.
DEBT_S = 60.0
# Seconds by which a bucket's time may be ahead of now and stay. Processes read one clock and write in another order, which must
# refill nothing. A larger lead means that the clock stepped back.
CLOCK_STEP_S = 1.0


class Rate(NamedTuple):
    """A quota: `per_s` units a second, of which at most `capacity` gather."""

    per_s: float
    capacity: float


class Bucket(NamedTuple):
    """The rest of a quota at a time. `level` is below zero after a use that was larger than the rest.

    A level is at least -DEBT_S of the quota. `forgiven` is what a use took beyond that, as long as the level is below zero.
    """

    level: float
    at_s: float
    forgiven: float = 0.0


def rate_of(per_s: float) -> Rate:
    """Return the quota of `per_s` units a second. LEAST units gather however small it is, so that each use passes in time.

    If no more than LEAST gathered, a full bucket would lose all the time until the next use.
    """
    return Rate(per_s, LEAST + LEASE_S * per_s)


def full(rate: Rate, now_s: float) -> Bucket:
    """Return the bucket of a quota that was not used for long."""
    return Bucket(rate.capacity, now_s)


def refilled(bucket: Bucket, rate: Rate, now_s: float) -> Bucket:
    """Return the bucket as it is now. A clock that was set back refills nothing.

    The bucket then takes the new time, so that it fills again within CLOCK_STEP_S. Each step back and forth may add the step's
    length of the quota once, never more than the capacity.
    """
    passed_s = max(0.0, now_s - bucket.at_s)
    level = min(rate.capacity, bucket.level + passed_s * rate.per_s)
    return Bucket(level, time_of(bucket.at_s, now_s), bucket.forgiven if level < 0 else 0.0)


def time_of(at_s: float, now_s: float) -> float:
    """Return the later of a bucket's time and now; now if the bucket's time is more than CLOCK_STEP_S ahead."""
    return now_s if at_s > now_s + CLOCK_STEP_S else max(now_s, at_s)


def spend(bucket: Bucket, rate: Rate, amount: float) -> Bucket:
    """Return the bucket after a use, or after a correction, whose amount is below zero.

    A correction first takes back what was forgiven: else an estimate that was too high would pay earlier uses.
    """
    if amount < 0:
        unforgiven = min(bucket.forgiven, -amount)
        return bucket._replace(level=bucket.level - amount - unforgiven, forgiven=bucket.forgiven - unforgiven)
    whole = bucket.level - amount
    level = max(whole, min(bucket.level, -DEBT_S * rate.per_s))
    return bucket._replace(level=level, forgiven=bucket.forgiven + (level - whole))


def wait_s(level: float, rate: Rate, cost: float) -> float:
    """Return the seconds until `cost` may be used, 0 if it may be now.

    A use larger than LEAST may begin when LEAST is there. The level is then below zero until the quota has made up for it.
    So the average exceeds the quota only by what single uses took beyond DEBT_S of the quota, which is forgiven.
    """
    return max(0.0, min(cost, LEAST) - level) / rate.per_s


class Settled(NamedTuple):
    """A quota's account after a server has settled, and the lease that the server holds now."""

    account: Bucket
    lease: float


def settle(account: Bucket, rate: Rate, lease: float, spent: float, now_s: float) -> Settled:
    """Book what a server has `spent` since it last settled, and lease it what the account has, up to the rate's capacity.

    LEAST units stay in the account for another server, unless this server has less: else the server that settles first could
    fill its lease while another server refuses requests.

    `lease` is what the server held. A server may have spent more than that: before it had a lease, or in one large use. The
    account pays for it, below zero if need be, so that other servers wait. A correction goes to the account.
    """
    left = lease - spent
    kept = min(max(min(left, lease), 0.0), rate.capacity)
    paid = spend(refilled(account, rate, now_s), rate, kept - left)
    needed = max(0.0, min(LEAST - kept, paid.level))
    granted = min(rate.capacity - kept, needed + max(0.0, paid.level - needed - LEAST))
    return Settled(paid._replace(level=min(paid.level - granted, rate.capacity)), kept + granted)


def given_back(account: Bucket, rate: Rate, lease: float, now_s: float) -> Bucket:
    """Return the account after the lease of a server that is idle, or lost, came back."""
    now = refilled(account, rate, now_s)
    return now._replace(level=min(rate.capacity, now.level + lease))
