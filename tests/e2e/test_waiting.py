"""Waiting, told by a real Envoy to real clients: who is held goes, leaves, is refused in time, or is sent away."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import httpx2
import openai
import pytest

from tests.support.gateway import Gateway, running_gateway
from tests.support.patient_engine import patient_engine

CHAT = "/v1/chat/completions"
QUEUE_REQUESTS = 500
CROWD = 2_000

POLICY = """
version: 1
models:
  tiny:
    tokenizer: {tokenizer}
    context_tokens: 16_384
    default_output_tokens: 64
    lanes: {{interactive: chat}}
lanes:
  interactive: {{max_input_tokens: 4_096, max_output_tokens: 2_048, deadline_ms: 60s, residence_ms: {residence},
                queue_requests: {queue_requests}, queue_tokens: 1_000_000}}
pools:
  chat:
    replicas: [{{name: chat-0, address: "{chat}", ceiling_tokens: 2_000}}]
    guard_band_permille: 0
    prefill_tokens_per_s: 20_000
    decode_tokens_per_s: 1_000
tenants:
  identity: {{header: x-tenant-id}}
  tiers: {{paid: {{}}}}
  members: {{acme: {{tier: paid}}}}
"""


def policy(engine: str, tokenizer_dir: Path, **changes: Any) -> str:
    """2,000 tokens in one lane, in which requests wait for up to 3 s."""
    fields: dict[str, Any] = {"residence": "3s", "queue_requests": QUEUE_REQUESTS}
    return POLICY.format(tokenizer=tokenizer_dir / "tokenizer.json", chat=engine, **(fields | changes))


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """An engine whose streamed answers go on until their clients leave."""
    with patient_engine() as address:
        yield address


@pytest.fixture(scope="module")
def shared(engine: str, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway for all tests that leave it as it was."""
    with running_gateway(tmp_path_factory.mktemp("waiting"), policy(engine, tokenizer_dir)) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared: Gateway) -> Iterator[Gateway]:
    """The shared gateway, idle before and after: nobody is held, and nobody waits."""
    shared.await_idle()
    yield shared
    shared.await_idle()


def chat(text: str = "Hello!", **changes: Any) -> dict[str, Any]:
    """A chat."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **changes}


@asynccontextmanager
async def clients(gateway: Gateway) -> AsyncIterator[aiohttp.ClientSession]:
    """Any number of clients of acme's."""
    async with aiohttp.ClientSession(
        base_url=gateway.url,
        headers={"x-tenant-id": "acme"},
        timeout=aiohttp.ClientTimeout(total=120),
        connector=aiohttp.TCPConnector(limit=0),
    ) as session:
        yield session


@asynccontextmanager
async def a_full_pool(session: aiohttp.ClientSession, tokens: int = 1_900) -> AsyncIterator[None]:
    """One answer that goes on and on holds nearly everything, until its client hangs up."""
    body = chat("Tell me everything.", max_tokens=tokens, stream=True)
    async with session.post(CHAT, json=body) as answer:
        assert answer.status == 200
        await answer.content.readany()
        yield
        answer.close()


async def ask(session: aiohttp.ClientSession, **changes: Any) -> tuple[int, dict[str, str], Any]:
    """Ask for 500 tokens: too much while the pool is full."""
    body = chat(**({"max_tokens": 500} | changes))
    async with session.post(CHAT, json=body) as answer:
        content = await answer.json()
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, content


def queued(gateway: Gateway) -> int:
    """How many wait right now."""
    return sum(lane["queued_requests"] for pool in gateway.state()["pools"] for lane in pool["lanes"])


async def until_queued(gateway: Gateway, count: int) -> None:
    """Until so many wait."""
    async with asyncio.timeout(10):
        while await asyncio.to_thread(queued, gateway) != count:
            await asyncio.sleep(0.02)


async def test_who_is_held_goes_when_there_is_room(gateway: Gateway) -> None:
    """The end of one answer admits the next request, and records and engine know that it has waited."""
    async with clients(gateway) as session:
        async with a_full_pool(session):
            held = asyncio.create_task(ask(session))
            await until_queued(gateway, 1)
            await asyncio.sleep(0.3)
            assert not held.done()
        status, headers, _ = await held
    assert status == 200
    admission = (await asyncio.to_thread(gateway.logged, headers["x-request-id"]))["admission"]
    assert admission["decision"] == "admitted"
    assert 300 <= admission["waited_ms"] < 3_000


async def test_who_hangs_up_while_held_is_gone(gateway: Gateway) -> None:
    """The place is given up at once, not when its time is over, and nobody is admitted into the void."""
    async with clients(gateway) as session, a_full_pool(session):
        held = asyncio.create_task(ask(session))
        await until_queued(gateway, 1)
        began = time.monotonic()
        held.cancel()
        await until_queued(gateway, 0)
        assert time.monotonic() - began < 2, "the ticket outlived its client"


async def test_who_has_waited_long_enough_is_refused(gateway: Gateway) -> None:
    """After the lane's residence: 429 with the reason, what it waited for, and when to come back."""
    async with clients(gateway) as session, a_full_pool(session):
        status, headers, content = await ask(session)
    error = content["error"]
    assert (status, headers["x-admission-reason"]) == (429, "residence_expired")
    assert error["waited_ms"] >= 3_000
    assert "No replica has enough unreserved tokens" in error["message"]
    assert error["ahead_requests"] == 0
    assert int(headers["retry-after"]) >= 1
    assert int(headers["retry-after-ms"]) == error["retry_after_ms"]


async def test_who_could_not_be_in_time_is_not_held(gateway: Gateway) -> None:
    """A client that gives up in half a second is told now that nearly 2,000 tokens will not leave until then."""
    async with clients(gateway) as session, a_full_pool(session):
        session.headers["x-stainless-read-timeout"] = "0.5"
        began = time.monotonic()
        status, headers, _ = await ask(session, max_tokens=1_500)
        assert time.monotonic() - began < 2.5
    assert (status, headers["x-admission-reason"]) == (429, "deadline_infeasible")


async def test_a_drain_sends_those_who_wait_away(
    engines: dict[str, str], tokenizer_dir: Path, tmp_path: Path
) -> None:
    """SIGTERM: whoever is held gets 503 draining at once; an answer that is under way goes on to its end."""
    with running_gateway(tmp_path, policy(engines["chat"], tokenizer_dir, residence="20s")) as gateway:
        async with clients(gateway) as session:
            body = chat("Tell me everything.", max_tokens=1_900, stream=True, ignore_eos=True)
            async with session.post(CHAT, json=body) as under_way:
                await under_way.content.readany()
                held = asyncio.create_task(ask(session))
                await until_queued(gateway, 1)
                assert gateway.service.process is not None
                gateway.service.process.send_signal(signal.SIGTERM)
                status, headers, content = await held
                rest = await under_way.content.read()
    assert (status, headers["x-admission-reason"]) == (503, "draining")
    assert content["error"]["code"] == "draining"
    assert rest.rstrip().endswith(b"data: [DONE]")


async def test_an_envoy_with_other_timeouts_is_noticed_and_never_answers_504(
    engine: str, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """A new policy allows longer waits than the Envoy that runs: said once, and waits end before Envoy's do."""
    with running_gateway(tmp_path, policy(engine, tokenizer_dir)) as gateway:
        (tmp_path / "policy.yaml").write_text(policy(engine, tokenizer_dir, residence="50s"))
        assert gateway.service.process is not None
        async with clients(gateway) as session:
            assert (await ask(session))[0] == 200
            assert gateway.state()["service"]["envoy_problem"] is None
            gateway.service.process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(20):
                while gateway.state()["service"]["envoy_problem"] is None:
                    await asyncio.sleep(0.1)
            async with a_full_pool(session):
                status, headers, content = await ask(session)
        assert (status, headers["x-admission-reason"]) == (429, "residence_expired")
        timeout_ms = gateway.state()["service"]["envoy_message_timeout_ms"]
        assert timeout_ms - 1_000 < content["error"]["waited_ms"] < timeout_ms
        assert "extproc_envoy_disagrees 1" in gateway.get("/metrics")
        assert gateway.service.log.read_text().count("policy and Envoy disagree") == 1


def resident_kib(pid: int) -> int:
    """Memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


async def test_a_crowd_finds_a_bounded_line(gateway: Gateway) -> None:
    """Of 2,000 at once no more than the bound wait; the others are refused, and nothing is left of it all."""
    most_queued = 0
    before_kib = resident_kib(gateway.service.pid)
    most_kib = before_kib

    async def watch() -> None:
        nonlocal most_queued, most_kib
        while True:
            most_queued = max(most_queued, await asyncio.to_thread(queued, gateway))
            most_kib = max(most_kib, resident_kib(gateway.service.pid))
            await asyncio.sleep(0.05)

    async with clients(gateway) as session, a_full_pool(session, 1_960):
        watcher = asyncio.create_task(watch())
        crowd = (ask(session, text=f"Question {number}", max_tokens=24) for number in range(CROWD))
        answers = await asyncio.gather(*crowd)
        watcher.cancel()
    reasons = {headers.get("x-admission-reason", "admitted") for _, headers, _ in answers}
    statuses = {status for status, _, _ in answers}
    assert statuses <= {200, 429}
    assert {"queue_full", "residence_expired"} <= reasons <= {"queue_full", "residence_expired", "admitted"}
    assert 0 < most_queued <= QUEUE_REQUESTS
    assert most_kib - before_kib < 200 * 1024
    full = next(
        content for _, headers, content in answers if headers.get("x-admission-reason") == "queue_full"
    )
    assert full["error"]["maximums"]["queue_requests"] == QUEUE_REQUESTS
    assert full["error"]["ahead_requests"] > 0


# The official libraries, as they are.


class Wire:
    """What an HTTP client sent and got, and when."""

    def __init__(self) -> None:
        self.sent_at: list[float] = []
        self.retry_counts: list[str] = []
        self.got: list[httpx2.Response] = []
        self.got_at: list[float] = []

    def client(self) -> httpx2.AsyncClient:
        """A client that notes."""
        return httpx2.AsyncClient(
            event_hooks={"request": [self._on_request], "response": [self._on_response]}, timeout=30
        )

    async def _on_request(self, request: httpx2.Request) -> None:
        self.sent_at.append(time.monotonic())
        self.retry_counts.append(request.headers["x-stainless-retry-count"])

    async def _on_response(self, response: httpx2.Response) -> None:
        self.got.append(response)
        self.got_at.append(time.monotonic())


@pytest.fixture(scope="module")
def impatient(
    engine: str, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway that lets nobody wait: who does not fit is told when to come back."""
    text = policy(engine, tokenizer_dir, residence="0", queue_requests=0)
    text = text.replace("queue_tokens: 1_000_000", "queue_tokens: 0")
    with running_gateway(tmp_path_factory.mktemp("impatient"), text) as gateway:
        yield gateway


async def with_openai(gateway: Gateway, wire: Wire, content: str) -> str:
    """A chat through the official library."""
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1",
        api_key="unused",
        default_headers={"x-tenant-id": "acme"},
        http_client=wire.client(),
    ) as library:
        answer = await library.chat.completions.create(
            model="tiny", max_tokens=500, messages=[{"role": "user", "content": content}]
        )
    return answer.choices[0].message.content or ""


async def with_anthropic(gateway: Gateway, wire: Wire, content: str) -> str:
    """A message through the official library."""
    async with anthropic.AsyncAnthropic(
        base_url=gateway.url,
        api_key="unused",
        default_headers={"x-tenant-id": "acme"},
        http_client=wire.client(),
    ) as library:
        answer = await library.messages.create(
            model="tiny", max_tokens=500, messages=[{"role": "user", "content": content}]
        )
    return "".join(block.text for block in answer.content if block.type == "text")


@pytest.mark.parametrize("call", [with_openai, with_anthropic], ids=["openai", "anthropic"])
async def test_official_libraries_wait_as_told_and_then_succeed(impatient: Gateway, call: Any) -> None:
    """Refused by a full pool, the library comes back after the time it was told, and is served."""
    wire = Wire()
    async with clients(impatient) as session:
        async with a_full_pool(session):
            calling = asyncio.create_task(call(impatient, wire, "Hello!"))
            async with asyncio.timeout(10):
                while not wire.got:
                    await asyncio.sleep(0.01)
        assert await calling
    assert [response.status_code for response in wire.got] == [429, 200]
    assert wire.retry_counts == ["0", "1"]
    told_s = int(wire.got[0].headers["retry-after-ms"]) / 1000
    assert told_s <= wire.sent_at[1] - wire.got_at[0]
    await asyncio.to_thread(impatient.await_idle)


@pytest.mark.parametrize(
    ("call", "error"),
    [(with_openai, openai.APIStatusError), (with_anthropic, anthropic.APIStatusError)],
    ids=["openai", "anthropic"],
)
async def test_official_libraries_stop_at_once_where_we_say_never(
    impatient: Gateway, call: Any, error: type[Exception]
) -> None:
    """A prompt that can never fit is asked about once."""
    wire = Wire()
    with pytest.raises(error) as caught:
        await call(impatient, wire, "All the words that there are. " * 2_500)
    assert getattr(caught.value, "status_code", None) == 413
    assert len(wire.got) == 1
    assert wire.got[0].headers["x-should-retry"] == "false"
    assert json.loads(wire.got[0].content)["error"]


@pytest.mark.parametrize("call", [with_openai, with_anthropic], ids=["openai", "anthropic"])
async def test_official_libraries_do_not_notice_a_hold(gateway: Gateway, call: Any) -> None:
    """Held and then admitted is one request to them: no retry, no error."""
    wire = Wire()
    async with clients(gateway) as session:
        async with a_full_pool(session):
            calling = asyncio.create_task(call(gateway, wire, "Hello!"))
            await until_queued(gateway, 1)
        assert await calling
    assert [response.status_code for response in wire.got] == [200]
