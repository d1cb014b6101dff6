"""Whatever body mode an operator's Envoy announces, the real Envoy gets the decision that a buffered one gets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.test_admission import SENTENCE, chat
from tests.support import child
from tests.support.envoy_binary import EnvoyProcess
from tests.support.gateway import Gateway, await_healthy

MODES = {
    "streamed, made buffered by the service": {"request_body_mode": "STREAMED"},
    "streamed, the body comes unasked": {
        "request_body_mode": "STREAMED",
        "allow_mode_override": "false",
        "send_body_without_waiting_for_header_response": "true",
    },
    "none, made buffered by the service": {"request_body_mode": "NONE"},
    "partly buffered": {"request_body_mode": "BUFFERED_PARTIAL"},
    "full duplex": {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"},
    "full duplex both ways": {
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
    },
}


@contextmanager
def another_envoy(gateway: Gateway, directory: Path, changes: dict[str, str]) -> Iterator[str]:
    """A second Envoy in front of the same service, its ext_proc filter changed; the URL of its listener."""
    text = (gateway.envoy.directory / "envoy.yaml").read_text()
    (port,) = child.free_ports(1)
    old_port = gateway.url.rpartition(":")[2]
    assert text.count(f"port_value: {old_port}") == 1
    text = text.replace(f"port_value: {old_port}", f"port_value: {port}")
    for name, value in changes.items():
        text, replaced = re.subn(rf"(\b{name}: )\w+", rf"\g<1>{value}", text)
        if not replaced and name.endswith("_mode"):
            text, replaced = re.subn(
                r"^( *)processing_mode:$", rf"\g<0>\n\g<1>  {name}: {value}", text, flags=re.MULTILINE
            )
        elif not replaced:
            text, replaced = re.subn(
                r"^( *)message_timeout:", rf"\g<1>{name}: {value}\n\g<0>", text, flags=re.MULTILINE
            )
        assert replaced == 1, name
    with EnvoyProcess(config_text=text, directory=directory) as envoy:
        await_healthy(envoy)
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("mode", MODES)
async def test_the_decision_is_the_same_in_every_body_mode(
    sim_gateway: Gateway, tmp_path: Path, mode: str
) -> None:
    """A chat and a document are admitted whole, an impossible prompt is refused, and nothing stays held."""
    with another_envoy(sim_gateway, tmp_path, MODES[mode]) as url:
        async with aiohttp.ClientSession(headers={"x-tenant-id": "acme"}) as client:
            for body, status in (
                (chat(), 200),
                (chat(SENTENCE * 600), 200),
                (chat(SENTENCE * 4_000), 413),
                (chat(model="nope"), 400),
            ):
                async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
                    text = await answer.text()
                    assert answer.status == status, text
                    if status == 200:
                        assert '"usage"' in text
            async with client.get(f"{url}/v1/models") as answer:
                assert answer.status == 200
        await asyncio.to_thread(sim_gateway.await_idle)
