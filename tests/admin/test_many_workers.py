"""The admin port over several workers keeps the promises of one worker's."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from extproc.adapters.admin_http import AdminServer
from extproc.supervisor.admin import SupervisorAdmin, WorkerView
from extproc.supervisor.children import Child
from extproc.supervisor.merge import merged_recent
from tests.admin.port import FakeService
from tests.support import child

ADMIN = {"x-extproc-admin": "1"}


@asynccontextmanager
async def port_over(services: list[FakeService], directory: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the admin port over these workers, whose loggers are called worker-0, worker-1 and so on."""
    async with AsyncExitStack() as stack:
        views = []
        for number, service in enumerate(services):
            socket_path = directory / f"{number}.sock"
            server = AdminServer(
                sources=service.sources(), host=f"unix:{socket_path}", logger=f"worker-{number}"
            )
            await server.start()
            stack.push_async_callback(server.stop)
            views.append(WorkerView(Child(f"worker-{number}", ()), f"address-{number}", socket_path))
        (port,) = child.free_ports(1)
        admin = SupervisorAdmin("127.0.0.1", port, views, details=dict)
        await admin.start()
        stack.push_async_callback(admin.stop)
        yield await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))


def a_worker(*at_ms: int, **counts: list[int]) -> FakeService:
    """A worker that decided at these times, and counted so much."""
    return FakeService(
        decisions=[{"at_ms": at} for at in at_ms],
        counts={"slot_s": 15, "counts": counts, "refusals": [name for name in counts if name != "admitted"]},
    )


async def test_what_happened_lately_is_that_of_all_workers(tmp_path: Path) -> None:
    """Decisions are merged in order, newest first, and counts are added up, by slot."""
    services = [a_worker(40, 20, admitted=[1, 2]), a_worker(30, 10, admitted=[0, 5], queue_full=[1, 0])]
    async with port_over(services, tmp_path) as client, client.get("/recent") as answer:
        recent = await answer.json()

    assert [decision["at_ms"] for decision in recent["decisions"]] == [40, 30, 20, 10]
    assert recent["history"] == {
        "slot_s": 15,
        "counts": {"admitted": [1, 7], "queue_full": [1, 0]},
        "refusals": ["queue_full"],
    }
    assert merged_recent([]) == {"decisions": [], "history": {}}


async def test_the_log_level_is_set_in_every_worker(tmp_path: Path) -> None:
    """One change reaches all workers; a wrong one is refused as a worker refuses it."""
    async with port_over([a_worker(), a_worker()], tmp_path) as client:
        async with client.put("/loglevel", json={"level": "debug"}, headers=ADMIN) as answer:
            assert (answer.status, await answer.json()) == (200, {"level": "debug"})
        assert {logging.getLogger(f"worker-{number}").level for number in range(2)} == {logging.DEBUG}
        async with client.put("/loglevel", json={"level": "loud"}, headers=ADMIN) as answer:
            assert answer.status == 400


@pytest.mark.parametrize("path", ["/state", "/recent", "/metrics", "/policy", "/"])
async def test_re_bound_names_and_other_sites_are_kept_out(path: str, tmp_path: Path) -> None:
    """No page of another site can read through the merged port, nor change anything."""
    async with port_over([a_worker()], tmp_path) as client:
        async with client.get(path, headers={"host": "evil.example"}) as answer:
            assert answer.status == 421
        async with client.get(path) as answer:
            assert answer.status == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
        async with client.put("/loglevel", json={"level": "debug"}) as answer:
            assert answer.status == 403
