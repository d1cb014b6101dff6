"""The admin port: what it answers, to whom, and that it holds nobody up."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from extproc.domain.policy import ApiKeyIdentity
from extproc.domain.snapshot import TenantState
from extproc.ports import LedgerFault
from tests.admin.port import FakeService, an_engine, open_port, some_load
from tests.builders import a_policy, a_tenant
from tests.telemetry.facts import a_snapshot

ADMIN = {"x-extproc-admin": "1"}


async def test_alive_means_that_the_process_answers() -> None:
    """Liveness depends on nothing but the loop."""
    service = FakeService(checks={"tokenizers": "loading"})
    async with open_port(service) as (client, _), client.get("/livez") as answer:
        assert (answer.status, await answer.text()) == (200, "ok\n")


async def test_ready_means_that_every_named_check_holds() -> None:
    """Readiness lists each check, and says 503 and why until all of them hold."""
    service = FakeService(checks={"tokenizers": "tiny is being loaded", "draining": None})
    async with open_port(service) as (client, _):
        async with client.get("/readyz") as answer:
            assert answer.status == 503
            assert await answer.json() == {
                "ready": False,
                "checks": [
                    {"check": "tokenizers", "ok": False, "detail": "tiny is being loaded"},
                    {"check": "draining", "ok": True, "detail": None},
                ],
            }
        service.checks["tokenizers"] = None
        async with client.get("/readyz") as answer:
            assert (answer.status, (await answer.json())["ready"]) == (200, True)


async def test_state_shows_what_is_held_beside_what_may_be() -> None:
    """Pools, replicas, lanes and tenants, each with its limit, what is reserved and what is left."""
    service = FakeService(policy_error="policy.yaml:3: pools.chat: ...")
    async with open_port(service) as (client, _), client.get("/state") as answer:
        state = await answer.json()

    assert state["service"]["uptime_s"] == 90
    assert state["service"]["open_streams"] == 7
    assert state["policy"] == {
        "version": "test",
        "loaded_at_ms": 1_000_500,
        "last_reload_error": "policy.yaml:3: pools.chat: ...",
    }
    assert (state["idle"], state["leases"], state["ledger_error"]) == (False, 7, None)
    (pool,) = state["pools"]
    assert (pool["pool"], pool["reserved_tokens"], pool["limit_tokens"]) == ("chat", 66_000, 86_400)
    assert pool["replicas"][0]["headroom_tokens"] == 20_400
    assert [(lane["lane"], lane["headroom_tokens"]) for lane in pool["lanes"]] == [
        ("interactive", 26_400),
        ("bulk", 34_000),
    ]
    assert [tenant["tenant"] for tenant in state["tenants"]] == ["acme", "zeta"]


async def test_state_shows_what_is_known_of_engines() -> None:
    """What they tell, whether they get requests, and which lanes are suspended; what is unknown is null."""
    unknown = an_engine("chat", "r0", signal=None, age_ms=None)
    for load, told in (
        (some_load("chat", an_engine("chat", "r0")), (3, 8, 640, False, 2_000)),
        (some_load("chat", unknown), (None, None, None, True, None)),
    ):
        async with open_port(FakeService(load=load)) as (client, _), client.get("/state") as answer:
            (pool,) = (await answer.json())["pools"]
        engine = pool["replicas"][0]["engine"]
        names = ("waiting_requests", "running_requests", "kv_used_permille", "is_stale", "age_ms")
        assert tuple(engine[name] for name in names) == told
        assert (engine["breaker"], engine["probes"]) == ("closed", {"ok": 7})
        assert pool["pressure_permille"] == 1_200
        assert {lane["lane"]: lane["suspended"] for lane in pool["lanes"]} == {
            "interactive": False,
            "bulk": True,
        }


async def test_state_is_bounded_however_many_tenants_there_are() -> None:
    """Only the tenants that hold most are listed, and any one that is asked for."""
    tenants = tuple(
        TenantState(
            tenant=f"t{number}",
            tier="gold",
            inflight_tokens=number,
            inflight_requests=1,
            tokens_remaining=None,
            requests_remaining=None,
        )
        for number in range(20_000)
    )
    async with open_port(FakeService(held=a_snapshot(tenants=tenants))) as (client, _):
        async with client.get("/state?tenants=2") as answer:
            state = await answer.json()
        assert [tenant["tenant"] for tenant in state["tenants"]] == ["t19999", "t19998"]
        assert state["tenants_total"] == 20_000
        async with client.get("/state?tenant=t77") as answer:
            assert [tenant["tenant"] for tenant in (await answer.json())["tenants"]] == ["t77"]
        for wrong in ("-1", "1001", "x", "9" * 5_000):
            async with client.get("/state", params={"tenants": wrong}) as answer:
                assert answer.status == 400
                assert await answer.text() == "tenants must be a whole number from 0 to 1000.\n"


async def test_a_ledger_that_is_down_does_not_take_the_state_with_it() -> None:
    """What can be said without the ledger is said, and the fault with it."""
    service = FakeService(fault=LedgerFault("the store refuses connections"))
    async with open_port(service) as (client, _), client.get("/state") as answer:
        state = await answer.json()

    assert answer.status == 200
    assert state["ledger_error"] == "the store refuses connections"
    assert state["service"]["open_streams"] == 7
    assert "pools" not in state


async def test_many_who_ask_at_once_ask_the_ledger_once() -> None:
    """However many poll the state, the ledger sees one question at a time and few per second."""
    service = FakeService()
    async with open_port(service) as (client, _):

        async def ask() -> int:
            async with client.get("/state") as answer:
                return answer.status

        assert set(await asyncio.gather(*(ask() for _ in range(20)))) == {200}
    assert service.asked == 1


async def test_the_policy_is_shown_without_key_digests() -> None:
    """The effective policy is readable, and no digest of a key is in it."""
    digest = "ab" * 32
    policy = a_policy(
        tenants=(a_tenant(key_sha256=(digest,)),), identity=ApiKeyIdentity(header="authorization")
    )
    async with open_port(FakeService(rules=policy)) as (client, _), client.get("/policy") as answer:
        text = await answer.text()
        shown = await answer.json()

    assert digest not in text
    assert shown["tenants"]["acme"] == {"id": "acme", "tier": "gold", "enabled": True, "keys": 1}
    assert shown["pools"]["chat"]["replicas"][0]["ceiling_tokens"] == 96_000
    assert shown["models"]["tiny"]["lanes"] == {"interactive": "chat", "bulk": "chat"}


async def test_metrics_are_served_in_the_format_the_scraper_asks_for() -> None:
    """The scraper's Accept header is handed on, and the page comes with its own content type."""
    service = FakeService(page=(b"# EOF\n", "application/openmetrics-text; version=1.0.0; charset=utf-8"))
    accept = {"accept": "application/openmetrics-text"}
    async with open_port(service) as (client, _), client.get("/metrics", headers=accept) as answer:
        assert answer.headers["content-type"] == service.page[1]
        assert await answer.read() == b"# EOF\n"
    assert service.accepts == ["application/openmetrics-text"]


@pytest.fixture
def logger() -> logging.Logger:
    """A logger of this test's own."""
    logger = logging.getLogger("extproc-test-level")
    logger.setLevel(logging.INFO)
    return logger


async def test_the_log_level_changes_at_run_time(logger: logging.Logger) -> None:
    """An operator sees and sets the level without a restart; a wrong one is refused by name."""
    async with open_port(FakeService(), logger=logger.name) as (client, _):
        async with client.get("/loglevel") as answer:
            assert await answer.json() == {"level": "info"}
        async with client.put("/loglevel", json={"level": "debug"}, headers=ADMIN) as answer:
            assert (answer.status, await answer.json()) == (200, {"level": "debug"})
        assert logger.level == logging.DEBUG
        for wrong in (b'{"level": "loud"}', b'["debug"]', b"{", b"", b'{"level": ["debug"]}'):
            async with client.put("/loglevel", data=wrong, headers=ADMIN) as answer:
                assert answer.status == 400
                assert "debug" in await answer.text()
        async with client.put("/loglevel", data=b"x" * 5_000, headers=ADMIN) as answer:
            assert answer.status == 413
        assert logger.level == logging.DEBUG


async def test_other_sites_pages_can_change_nothing(logger: logging.Logger) -> None:
    """Without the header that only a script of this origin may send, nothing changes; nor across sites."""
    async with open_port(FakeService(), logger=logger.name) as (client, _):
        async with client.put("/loglevel", json={"level": "debug"}) as answer:
            assert answer.status == 403
        crossing = {**ADMIN, "sec-fetch-site": "cross-site"}
        async with client.put("/loglevel", json={"level": "debug"}, headers=crossing) as answer:
            assert answer.status == 403
        async with client.options("/loglevel", headers={"origin": "http://evil.example"}) as answer:
            assert "access-control-allow-origin" not in answer.headers
            assert answer.status in (403, 405)
    assert logger.level == logging.INFO


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9901", 200),
        ("[::1]:9901", 200),
        ("localhost:9901", 200),
        ("10.1.2.3", 200),
        ("admin.internal:9901", 200),
        ("ADMIN.internal", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:80", 421),
        ("localhost.evil.example", 421),
        ("", 421),
    ],
)
async def test_a_re_bound_name_is_not_answered(host: str, status: int) -> None:
    """Only addresses, localhost and listed names are answered, so no page can re-bind its name to us."""
    names = frozenset({"Admin.internal"})
    async with (
        open_port(FakeService(), allowed_hosts=names) as (client, _),
        client.get("/state", headers={"host": host}) as answer,
    ):
        assert answer.status == status


async def test_every_answer_is_hardened() -> None:
    """Answers, errors too, may not be framed, sniffed, cached or read by other origins."""
    async with open_port(FakeService()) as (client, _):
        for path in ("/state", "/nothing", "/metrics", "/state?tenants=x"):
            async with client.get(path) as answer:
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert "default-src 'none'" in answer.headers["content-security-policy"]
                assert answer.headers["cache-control"] == "no-store"
                assert answer.headers["cross-origin-resource-policy"] == "same-origin"


async def test_a_question_that_fails_is_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    """A fault behind one page is a 500 without details, and the next page works."""
    service = FakeService(fault=RuntimeError("secret detail"))
    async with open_port(service) as (client, _):
        async with client.get("/state") as answer:
            assert answer.status == 500
            assert "secret detail" not in await answer.text()
        service.fault = None
        async with client.get("/state") as answer:
            assert answer.status == 200
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "admin request failed"
    ]


async def test_a_slow_ledger_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that hangs costs the page its balances, not its answer; probes never wait for it."""
    monkeypatch.setattr("extproc.adapters.admin_http.server.SNAPSHOT_TIMEOUT_S", 0.05)

    class Hanging(FakeService):
        async def snapshot(self) -> None:  # type: ignore[override]
            await asyncio.Event().wait()

    async with open_port(Hanging()) as (client, _):
        pending = asyncio.create_task(client.get("/state"))
        async with client.get("/livez") as answer:
            assert answer.status == 200
        async with await pending as answer:
            assert (await answer.json())["ledger_error"] == "the ledger did not answer within 0.05 s"


async def test_too_many_at_once_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are answered in bounded number; probes always."""
    monkeypatch.setattr("extproc.adapters.admin_http.server.MOST_AT_ONCE", 2)
    let_go = asyncio.Event()

    class Slow(FakeService):
        async def metrics(self, accept: str) -> tuple[bytes, str]:
            await let_go.wait()
            return await super().metrics(accept)

    async with open_port(Slow()) as (client, _):
        waiting = [asyncio.create_task(client.get("/metrics")) for _ in range(2)]
        await asyncio.sleep(0.05)
        async with client.get("/metrics") as answer:
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        async with client.get("/readyz") as answer:
            assert answer.status == 200
        let_go.set()
        for one in waiting:
            async with await one as answer:
                assert answer.status == 200


async def test_the_port_closes_with_its_connections() -> None:
    """Stopping ends at once, open connections included, and may be repeated."""
    service = FakeService()
    async with open_port(service) as (client, server):
        async with client.get("/livez"):
            pass
        await asyncio.wait_for(server.stop(), 2)
        await server.stop()


async def test_the_policy_page_follows_the_policy() -> None:
    """After a reload the new policy is shown."""
    service = FakeService()
    async with open_port(service) as (client, _):
        async with client.get("/policy") as answer:
            assert (await answer.json())["version"] == "test"
        service.rules = replace(service.rules, version="next")
        async with client.get("/policy") as answer:
            assert (await answer.json())["version"] == "next"
