"""What is counted, under which labels, and that neither can grow without bound."""

from __future__ import annotations

import asyncio
import random
import re
import resource

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from extproc.adapters.telemetry.accumulators import SERIES_LIMIT
from extproc.adapters.telemetry.exposition import exposition
from extproc.adapters.telemetry.instruments import (
    CLOSED_LABELS,
    INSTRUMENTS,
    OTHER,
    POLICY_LABELS,
    Instrument,
    Kind,
)
from extproc.adapters.telemetry.metrics import Metrics, Reading
from extproc.domain.outcome import Outcome, Reason
from extproc.domain.policy import Lane, Policy, PoolFallback, RegionFallback
from tests.builders import a_model, a_policy, a_tenant
from tests.telemetry.facts import a_decision, a_settled, a_snapshot, scraped, value


def some_metrics(policy: Policy | None = None, **arguments: object) -> Metrics:
    metrics = Metrics(**arguments)  # type: ignore[arg-type]
    metrics.policy_changed(policy or a_policy())
    return metrics


def test_a_decision_is_counted_by_lane_decision_reason_model_and_pool() -> None:
    """One request is one count, with its sizes and times in its lane's histograms."""
    metrics = some_metrics()
    metrics.decided(a_decision())
    samples = scraped(metrics)

    assert (
        value(
            samples,
            "extproc_requests_total",
            lane="interactive",
            decision="admitted",
            reason="none",
            model="tiny",
            pool="chat",
        )
        == 1
    )
    assert value(samples, "extproc_input_tokens_sum", lane="interactive") == 1_000
    assert value(samples, "extproc_requested_output_tokens_sum", lane="interactive") == 500
    assert value(samples, "extproc_read_seconds_sum", lane="interactive") == pytest.approx(0.0001)
    assert value(samples, "extproc_count_seconds_sum", lane="interactive") == pytest.approx(0.0003)
    by_outcome = {"lane": "interactive", "decision": "admitted"}
    assert value(samples, "extproc_hold_seconds_sum", **by_outcome) == pytest.approx(0.001)
    assert value(samples, "extproc_decision_seconds_sum", **by_outcome) == pytest.approx(0.0014)
    assert value(samples, "extproc_decision_seconds_bucket", le="0.001", **by_outcome) == 0
    assert value(samples, "extproc_decision_seconds_bucket", le="0.0025", **by_outcome) == 1
    assert value(samples, "extproc_decision_seconds_bucket", le="+Inf", **by_outcome) == 1


def test_a_refusal_is_counted_with_its_reason_and_its_wait() -> None:
    """A request that was refused before it was counted has a reason, a wait, and no sizes."""
    metrics = some_metrics()
    metrics.decided(
        a_decision(
            outcome=Outcome.REFUSED,
            reason=Reason.DRAINING,
            model=None,
            lane=None,
            pool=None,
            replica=None,
            input_tokens=None,
            output_tokens=None,
            work_units=None,
            read_us=None,
            counted_us=None,
            retry_after_ms=2_100,
        )
    )
    samples = scraped(metrics)

    labels = {"lane": "none", "decision": "refused", "reason": "draining", "model": "none", "pool": "none"}
    assert value(samples, "extproc_requests_total", **labels) == 1
    assert value(samples, "extproc_retry_after_seconds_sum", lane="none") == pytest.approx(2.1)
    assert value(samples, "extproc_input_tokens_count", lane="none") == 0


def test_a_record_tells_status_speed_and_use() -> None:
    """An answered request is a completion, in time or not, and shows what it used of what it reserved."""
    metrics = some_metrics()
    metrics.settled(a_settled())
    metrics.settled(a_settled(ttfb_ms=31_000))
    metrics.settled(a_settled(status=503))
    metrics.settled(a_settled(flags="downstream_connection_termination"))
    samples = scraped(metrics)

    in_pool = {"lane": "interactive", "pool": "chat"}
    assert value(samples, "extproc_completions_total", status="2xx", **in_pool) == 3
    assert value(samples, "extproc_completions_total", status="5xx", **in_pool) == 1
    assert value(samples, "extproc_goodput_requests_total", lane="interactive", model="tiny") == 1
    assert value(samples, "extproc_ttfb_seconds_count", **in_pool) == 4
    assert value(samples, "extproc_answer_seconds_sum", **in_pool) == pytest.approx(8.0)
    assert value(samples, "extproc_settled_reserved_tokens_total", direction="output", **in_pool) == 2_000
    assert value(samples, "extproc_settled_used_tokens_total", direction="output", **in_pool) == 400
    assert value(samples, "extproc_output_use_ratio_sum", lane="interactive") == pytest.approx(0.8)


def test_goodput_is_held_to_the_clients_own_deadline() -> None:
    """Within the lane's 30 s and later than the client's 100 ms is late; a client's 10 s are not."""
    metrics = some_metrics()
    metrics.settled(a_settled(ttfb_ms=120, deadline_ms=100))
    assert (
        "extproc_goodput_requests_total",
        frozenset({("lane", "interactive"), ("model", "tiny")}),
    ) not in {key for key, count in scraped(metrics).items() if count}
    metrics.settled(a_settled(ttfb_ms=120, deadline_ms=10_000))
    assert value(scraped(metrics), "extproc_goodput_requests_total", lane="interactive", model="tiny") == 1


def test_a_record_without_usage_is_flagged_and_spoils_no_ratio() -> None:
    """What was not measured is counted as missing, and never as zero tokens used."""
    metrics = some_metrics()
    metrics.settled(a_settled(used_input_tokens=None, used_output_tokens=None))
    samples = scraped(metrics)

    assert value(samples, "extproc_usage_missing_total", pool="chat", status="2xx") == 1
    assert value(samples, "extproc_count_checked_total", model="tiny") == 0
    in_pool = {"lane": "interactive", "pool": "chat"}
    assert value(samples, "extproc_settled_reserved_tokens_total", direction="output", **in_pool) == 0


@pytest.mark.parametrize(("used", "drifted", "tokens"), [(1_000, 0, 0), (1_007, 1, 7), (990, 1, 10)])
def test_drift_is_any_difference_to_the_engines_count(used: int, drifted: int, tokens: int) -> None:
    """A count that the engine disagrees with is a drift, in either direction."""
    metrics = some_metrics()
    metrics.settled(a_settled(used_input_tokens=used))
    samples = scraped(metrics)

    assert value(samples, "extproc_count_checked_total", model="tiny") == 1
    assert value(samples, "extproc_count_drift_total", model="tiny") == drifted
    assert value(samples, "extproc_count_drift_tokens_total", model="tiny") == tokens


def test_balances_are_shown_beside_their_limits() -> None:
    """The worked example: ceiling 96,000, guard band 9,600, 66,000 held, 20,400 left."""
    samples = scraped(some_metrics(), a_snapshot())

    replica = {"pool": "chat", "replica": "r0"}
    assert value(samples, "extproc_replica_limit_tokens", **replica) == 86_400
    assert value(samples, "extproc_replica_reserved_tokens", **replica) == 66_000
    assert value(samples, "extproc_replica_headroom_tokens", **replica) == 20_400
    assert value(samples, "extproc_lane_headroom_tokens", pool="chat", lane="bulk") == 34_000
    assert value(samples, "extproc_leases") == 7
    waiting = {"pool": "chat", "lane": "bulk"}
    assert value(samples, "extproc_queue_requests", **waiting) == 3
    assert value(samples, "extproc_queue_prefill_tokens", **waiting) == 9_000
    assert value(samples, "extproc_queue_oldest_seconds", **waiting) == 4.2
    assert value(samples, "extproc_tier_inflight_tokens", tier="gold") == 66_000
    assert value(samples, "extproc_tier_active_tenants", tier="gold") == 2
    assert value(samples, "extproc_ledger_up") == 1


def test_a_ledger_that_cannot_be_asked_shows_as_down_and_not_as_empty() -> None:
    """Unknown balances are absent, never zero."""
    samples = scraped(some_metrics(), None)

    assert value(samples, "extproc_ledger_up") == 0
    assert not [
        name
        for name, _ in samples
        if name.startswith(("extproc_replica_", "extproc_lane_reserved", "extproc_lease"))
    ]


def test_tenants_have_names_only_where_an_operator_asked_for_it() -> None:
    """Without a top-K no tenant is a label; with one, the largest are, and only configured ones by name."""
    policy = a_policy(tenants=(a_tenant(id="acme"),))
    assert not [name for name, _ in scraped(some_metrics(policy), a_snapshot()) if "tenant_inflight" in name]

    samples = scraped(some_metrics(policy, top_tenants=1), a_snapshot())
    named = [dict(labels)["tenant"] for name, labels in samples if name == "extproc_tenant_inflight_tokens"]
    assert named == ["acme"]


def test_readings_of_other_parts_are_exported_by_the_same_set() -> None:
    """What another part counts appears under its instrument's name; a name nobody declared is reported."""
    metrics = some_metrics(
        readings=[
            lambda: [
                Reading(name="extproc_tokenizer_pieces", labels=("hit",), value=41),
                Reading(name="extproc_signal_age_seconds", labels=("chat", "r0"), value=1_500),
                Reading(name="extproc_no_such_thing", value=1),
            ]
        ]
    )
    samples = scraped(metrics)

    assert value(samples, "extproc_tokenizer_pieces_total", result="hit") == 41
    assert value(samples, "extproc_signal_age_seconds", pool="chat", replica="r0") == 1.5
    assert metrics.unknown_readings == {"extproc_no_such_thing"}


def test_a_hundred_thousand_made_up_names_add_nothing() -> None:
    """Names that no policy has become `other`: neither series nor memory grow with them."""
    metrics = some_metrics()
    rng = random.Random(7)

    def flood(number: int) -> None:
        for _ in range(number):
            name = f"{rng.getrandbits(64):x}" * 12
            metrics.decided(a_decision(model=name, pool=name, tenant=name, tier=name, replica=name))
            metrics.settled(a_settled(model=name, pool=name, tenant=name, replica=name, lane=name))

    flood(10_000)
    series, page, rss = metrics.series, len(scraped(metrics)), _peak_rss_kib()
    flood(90_000)

    assert metrics.series == series
    assert len(scraped(metrics)) == page
    assert _peak_rss_kib() - rss < 4_096
    labels = {"lane": "interactive", "decision": "admitted", "reason": "none", "model": OTHER, "pool": OTHER}
    assert value(scraped(metrics), "extproc_requests_total", **labels) == 100_000


def test_a_policy_with_too_many_names_folds_what_is_over_the_limit() -> None:
    """Even a policy cannot make one metric arbitrarily large: what is over goes to `other`, and is told."""
    policy = a_policy(models=tuple(a_model(name=f"m{number}") for number in range(SERIES_LIMIT + 500)))
    metrics = some_metrics(policy)
    for name in policy.models:
        metrics.decided(a_decision(model=name))
    samples = scraped(metrics)

    counted = [labels for name, labels in samples if name == "extproc_requests_total"]
    assert len(counted) <= SERIES_LIMIT + 1
    assert sum(samples["extproc_requests_total", labels] for labels in counted) == len(policy.models)
    assert value(samples, "extproc_metric_series_folded_total") == 500


def test_a_reload_forgets_the_names_that_are_gone() -> None:
    """Series of a removed model end with the policy that named it; the others keep their counts."""
    metrics = some_metrics(a_policy(models=(a_model(name="old"), a_model(name="kept"))))
    metrics.decided(a_decision(model="old"))
    metrics.decided(a_decision(model="kept"))
    metrics.policy_changed(a_policy(models=(a_model(name="kept"),)))
    metrics.decided(a_decision(model="old"))
    metrics.decided(a_decision(model="kept"))
    samples = scraped(metrics)

    counts = {
        dict(labels)["model"]: count
        for (name, labels), count in samples.items()
        if name == "extproc_requests_total"
    }
    assert counts == {"kept": 2, OTHER: 1}


def test_every_label_of_every_instrument_is_bounded() -> None:
    """No instrument can be declared with a label whose values nobody fixes."""
    for instrument in INSTRUMENTS.values():
        assert re.fullmatch(r"extproc_[a-z_]+", instrument.name)
        assert not instrument.name.endswith("_total")
        assert set(instrument.labels) <= POLICY_LABELS | set(CLOSED_LABELS) | {"version", "python"}
    with pytest.raises(ValueError, match="'path' is not bounded"):
        Instrument(name="extproc_x", kind=Kind.COUNTER, help="x", labels=("path",))


def test_the_page_is_valid_openmetrics_too() -> None:
    """A scraper that asks for OpenMetrics gets it, ended as it must be, with every family once."""
    metrics = some_metrics(a_policy(models=tuple(a_model(name=f"m{number}") for number in range(300))))
    for number in range(300):
        for lane in Lane:
            metrics.decided(a_decision(model=f"m{number}", lane=lane))
    metrics.settled(a_settled())

    async def ask() -> None:
        return None

    page, content_type = asyncio.run(
        exposition(metrics, "application/openmetrics-text;version=1.0.0,text/plain;q=0.5", ask)
    )
    families = list(text_string_to_metric_families(page.decode()))  # type: ignore[no-untyped-call]

    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    requests = next(family for family in families if family.name == "extproc_requests")
    assert len(requests.samples) == 900


def test_a_scrape_gives_others_their_turn() -> None:
    """Rendering a large page is cut into slices between which the loop serves everybody else."""
    metrics = some_metrics(a_policy(models=tuple(a_model(name=f"m{number}") for number in range(1_000))))
    for number in range(1_000):
        metrics.decided(a_decision(model=f"m{number}"))
    turns = 0

    async def ask() -> None:
        return None

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def both() -> None:
        other = asyncio.create_task(count_turns())
        await exposition(metrics, "", ask)
        other.cancel()

    asyncio.run(both())
    assert turns >= 1_000 // 60


def _peak_rss_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_fallbacks_are_counted_by_the_policys_names() -> None:
    """One that went elsewhere counts there, with what became of it; a made-up name counts as other."""
    spare = PoolFallback(pool="spare")
    europe = RegionFallback(origin="https://eu.example")
    metrics = some_metrics(a_policy(models=(a_model(fallbacks=(spare, europe)),)))
    metrics.decided(a_decision())
    for label in (spare.label, spare.label, "pool:made-up"):
        metrics.decided(a_decision(fallback=label))
    metrics.decided(
        a_decision(outcome=Outcome.REFUSED, reason=Reason.TOKEN_BUDGET_EXHAUSTED, fallback=europe.label)
    )
    counts = {
        (dict(labels)["fallback"], dict(labels)["decision"]): count
        for (name, labels), count in scraped(metrics).items()
        if name == "extproc_fallbacks_total"
    }
    assert counts == {
        ("pool:spare", "admitted"): 2,
        ("region:https://eu.example", "refused"): 1,
        (OTHER, "admitted"): 1,
    }
