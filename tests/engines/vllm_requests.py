"""Requests for vLLM as clients send them, for each of its APIs and with its own fields; the same ones every time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.tokens.engine_requests import NAMES, Json, Requests

Request = tuple[str, Json]
"""A path and a body, `model` included."""

MODEL = "tiny"
EFFORTS = ("none", "low", "medium", "high")
LARGEST_ID = 4_000
ATTRIBUTION = "x-anthropic-billing-header: cc_version=1;"


class VllmRequests(Requests):
    """Writes requests of all APIs; `kwargs` are variables that the model's template knows."""

    def __init__(self, seed: int, *, thinking: bool = True, kwargs: tuple[str, ...] = ()) -> None:
        super().__init__(seed, thinking=thinking)
        self._odds = random.Random(seed + 1)
        self._kwargs = kwargs

    def happens(self, share: float) -> bool:
        return self._odds.random() < share

    def text(self) -> str:
        """A text; some begin with the line by which a coding agent attributes its requests."""
        if self.happens(0.02):
            return ATTRIBUTION + self._odds.choice(("", "\n", "\nrest of it", " one line"))
        return super().text()

    def chat(self) -> Request:
        """A chat: tools, system and developer turns, prefills, parts, thoughts, vLLM's own fields.

        There is no `seed`: the CPU build of vLLM 0.32 ends when such a request meets a prefill in chunks.
        """
        odds, body = self._odds, self.request()
        messages: list[Json] = body["messages"]
        if messages[0]["role"] == "system" and self.happens(0.1):
            messages[0]["content"] = self.attributed()
        last = messages[-1]
        # A thought that ends in the middle is cut out by the template, and then neither of the two goes on with it.
        whole = last["role"] == "assistant" and last["content"] and "</think>" not in str(last["content"])
        if whole and self.happens(0.7):
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if body.get("tools"):
            named = {"type": "function", "function": {"name": body["tools"][0]["function"]["name"]}}
            body |= odds.choice(
                ({}, {}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tool_choice": named})
            )
        if self.happens(0.1):
            variables = {name: odds.choice((True, False, None, "x")) for name in self._kwargs}
            body["chat_template_kwargs"] = variables | {"unheard_of": self.value()}
        if self.happens(0.1):
            body["reasoning_effort"] = odds.choice(EFFORTS)
        if self.happens(0.05):
            body["documents"] = [{"title": self.text(), "text": self.text()}]
        if self.happens(0.05):
            body["add_special_tokens"] = odds.choice((True, False))
        if self.happens(0.05):
            body["truncate_prompt_tokens"] = odds.choice((-1, 1, 7, 40, 2_000))
        if self.happens(0.1):
            body["n"] = odds.choice((1, 2, 3))
        if self.happens(0.1):
            messages[0]["unheard_of"] = self.value()
        if self.happens(0.05):
            body |= {"user": "u", "priority": 0, "parallel_tool_calls": False, "stop": ["\n"]}
        body |= odds.choice(
            ({"max_tokens": 1}, {"max_completion_tokens": 1}, {"max_tokens": 9, "max_completion_tokens": 1})
        )
        return "/v1/chat/completions", {"model": MODEL, **body}

    def attributed(self) -> Any:
        """System text as coding agents send it, in all its forms."""
        text = ATTRIBUTION + self._odds.choice(("", "\n", " and more\nYou are brief.\nVery."))
        parts = [{"type": "text", "text": text}, {"type": "text", "text": self.text()}]
        return self._odds.choice((text, parts, parts[::-1], parts[:1]))

    def ids(self) -> list[int]:
        return [self._odds.randrange(LARGEST_ID) for _ in range(self._odds.choice((1, 3, 50)))]

    def some_text(self) -> str:
        return self.text() or "x"

    def completion(self) -> Request:
        """A completion: a text, texts, token ids, lists of them; echo, several answers, truncation."""
        odds = self._odds
        prompt: Any = odds.choice(
            (
                self.some_text,
                lambda: [self.some_text() for _ in range(odds.choice((1, 2, 4)))],
                self.ids,
                lambda: [self.ids() for _ in range(odds.choice((1, 3)))],
            )
        )()
        body: Json = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        if self.happens(0.15):
            body["echo"] = True
        if self.happens(0.15):
            body["n"] = odds.choice((2, 3))
        if self.happens(0.15):
            body["truncate_prompt_tokens"] = odds.choice((-1, 1, 5, 1_000))
        if self.happens(0.15):
            body["add_special_tokens"] = odds.choice((True, False))
        return "/v1/completions", body

    def response(self) -> Request:
        """A responses request: a text, or items of which messages, calls, results and thoughts are made."""
        odds = self._odds
        body: Json = {"model": MODEL, "max_output_tokens": 1, "store": False}
        if self.happens(0.4):
            body["instructions"] = self.text()
        tools = self.happens(0.4)
        if tools:
            body["tools"] = [
                {"type": "function", **tool["function"]}
                for tool in (self.tool(name) for name in odds.sample(NAMES, odds.choice((1, 2))))
            ]
            for tool in body["tools"]:
                tool.setdefault("parameters", {"type": "object", "properties": {}})
                tool.setdefault("strict", False)
            if self.happens(0.3):
                body["tool_choice"] = odds.choice(("auto", "none"))
        if self.happens(0.2):
            body["reasoning"] = {"effort": odds.choice(EFFORTS)}
        body["input"] = self.text() if self.happens(0.2) else self.items(tools=tools)
        return "/v1/responses", body

    def items(self, *, tools: bool) -> list[Json]:
        odds = self._odds
        items: list[Json] = []
        if self.happens(0.2):
            items.append({"role": odds.choice(("system", "developer")), "content": self.text()})
        for number in range(odds.choice((0, 1, 1, 2))):
            items.append({"role": "user", "content": self.spoken()})
            if self._thinking and self.happens(0.3):
                thought = [{"type": "reasoning_text", "text": self.text()}]
                items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": thought})
            if tools and self.happens(0.6):
                call = self.call(number)
                called = {"call_id": call["id"], "type": "function_call", **call["function"]}
                items.append(called)
                items.append({"type": "function_call_output", "call_id": call["id"], "output": self.text()})
            answer: Json = {"role": "assistant", "content": self.text()}
            if self.happens(0.3):
                answer = {
                    "type": "message",
                    "id": f"msg_{number}",
                    "status": "completed",
                    "role": "assistant",
                }
                answer["content"] = [{"type": "output_text", "text": self.text(), "annotations": []}]
            items.append(answer)
        items.append({"role": "user", "content": self.spoken()})
        return items

    def spoken(self) -> Any:
        if self.happens(0.5):
            return self.text()
        return [{"type": "input_text", "text": self.text()} for _ in range(self._odds.choice((1, 2)))]

    def message(self) -> Request:
        """An Anthropic request: system text, blocks, thoughts, tools and their results."""
        odds = self._odds
        tools = self.happens(0.4)
        body: Json = {"model": MODEL, "max_tokens": 1, "messages": []}
        if self.happens(0.4):
            body["system"] = self.text() if self.happens(0.5) else self.blocks()
        if self.happens(0.1):
            body["system"] = self.attributed()
        if tools:
            body["tools"] = []
            for name in odds.sample(NAMES, odds.choice((1, 2))):
                function = self.tool(name)["function"]
                schema = function.get("parameters", {"properties": {}})
                tool = {"name": name, "input_schema": schema}
                if "description" in function:
                    tool["description"] = function["description"]
                body["tools"].append(tool)
        for number in range(odds.choice((0, 0, 1, 2))):
            body["messages"].append({"role": "user", "content": self.said()})
            blocks: list[Json] = []
            if self._thinking and self.happens(0.3):
                blocks.append({"type": "thinking", "thinking": self.text(), "signature": "s"})
            if tools and self.happens(0.6):
                called = {
                    "type": "tool_use",
                    "id": f"t{number}",
                    "name": NAMES[0],
                    "input": {"a": self.value()},
                }
                body["messages"].append({"role": "assistant", "content": [*blocks, *self.blocks(), called]})
                result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": self.said()}
                body["messages"].append({"role": "user", "content": [result, *self.blocks()]})
                blocks = []
            body["messages"].append({"role": "assistant", "content": [*blocks, *self.blocks()]})
        if self.happens(0.1):
            body["messages"].append(
                {"role": "system", "content": self.attributed() if self.happens(0.3) else self.said()}
            )
        body["messages"].append({"role": "user", "content": self.said()})
        if self.happens(0.1):
            body["thinking"] = odds.choice(({"type": "disabled"}, {"type": "adaptive"}))
        if self.happens(0.1):
            body["output_config"] = {"effort": odds.choice(EFFORTS[1:])}
        return "/v1/messages", body

    def said(self) -> Any:
        return self.text() if self.happens(0.5) else self.blocks()

    def blocks(self) -> list[Json]:
        return [{"type": "text", "text": self.text()} for _ in range(self._odds.choice((1, 1, 2)))]

    def tokens(self) -> Request:
        """Tokens in, tokens out."""
        body = {"model": MODEL, "token_ids": self.ids(), "sampling_params": {"max_tokens": 1}}
        return "/inference/v1/generate", body


def requests(count: int, *, seed: int, **settings: Any) -> Iterator[Request]:
    """`count` requests: of twelve, five are chats."""
    writer = VllmRequests(seed, **settings)
    kinds: tuple[Callable[[], Request], ...] = (
        *[writer.chat] * 5,
        *[writer.completion] * 2,
        *[writer.response] * 2,
        *[writer.message] * 2,
        writer.tokens,
    )
    for number in range(count):
        yield kinds[number % len(kinds)]()
