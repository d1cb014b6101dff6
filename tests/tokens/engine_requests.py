"""Chat requests of every kind that clients send, the same ones every time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz     ",
    "ABC xyz 0123456789 .,;:!?-_()[]{}<>/\\|'\"`~@#$%^&*+=\t\n",
    "é à ü ß ñ ç ø ł ž ő  ",
    "你好世界今天天气很好 我们去散步吧。",
    "こんにちは カタカナ ひらがな 漢字 한국어 문장 ",
    "Привет мир שלום עולם مرحبا بالعالم नमस्ते दुनिया ",
    "🤖🚀🎉👩‍👩‍👧🏳️‍🌈 😀 1️⃣ ",
    " \n\t\r\u00a0\u3000\u2028\u200b",
    "e\u0301 A\u030a n\u0303 \u1100\u1161 q\u0323\u0307 ",
)
SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_end",
    "|>",
    "<think>",
    "</think>",
    "<tool_call>",
)
NAMES = ("get_depth", "search", "f", "sende_nachricht_ü")
WORDS = ("river", "deep", "Größe", "日本", "x_1", "is-on", "a b")


class Requests:
    """Writes requests. `thinking` says whether assistants may have thoughts."""

    def __init__(self, seed: int, *, thinking: bool) -> None:
        self._chance = random.Random(seed)
        self._thinking = thinking

    def text(self) -> str:
        chance = self._chance
        if chance.random() < 0.08:
            return chance.choice(("", " ", "\n", "  hi  \n", "7" * 40, "word " * 60))
        alphabet = chance.choice(ALPHABETS)
        text = "".join(chance.choice(alphabet) for _ in range(chance.choice((1, 5, 20, 60, 150))))
        if chance.random() < 0.2:
            at = chance.randrange(len(text) + 1)
            text = text[:at] + chance.choice(SPECIALS) + text[at:]
        return text

    def content(self) -> Any:
        if self._chance.random() < 0.15:
            return [{"type": "text", "text": self.text()} for _ in range(self._chance.choice((1, 2, 2, 3)))]
        return self.text()

    def value(self, depth: int = 0) -> Any:
        chance = self._chance
        kind = chance.randrange(8 if depth < 2 else 6)
        if kind == 6:
            return [self.value(depth + 1) for _ in range(chance.randrange(4))]
        if kind == 7:
            return {chance.choice(WORDS): self.value(depth + 1) for _ in range(chance.randrange(4))}
        return (
            self.text()[:30],
            chance.randrange(-1000, 100_000),
            chance.choice((0.5, 1.25, -3.75, 2.0, 0.1)),
            chance.choice((True, False)),
            None,
            chance.choice(WORDS),
        )[kind]

    def call(self, number: int) -> Json:
        arguments = {word: self.value() for word in self._chance.sample(WORDS, self._chance.randrange(4))}
        written = json.dumps(
            arguments,
            ensure_ascii=self._chance.random() < 0.3,
            separators=self._chance.choice(((",", ":"), (", ", ": "))),
        )
        function = {"name": self._chance.choice(NAMES), "arguments": written}
        return {"id": f"call-{number}", "type": "function", "function": function}

    def tool(self, name: str) -> Json:
        chance = self._chance
        function: Json = {"name": name}
        if chance.random() < 0.9:
            function["description"] = self.text()
        if chance.random() < 0.9:
            properties = {
                word: {"type": "string", "description": self.text()[:40], "enum": ["a", "ü"]}
                for word in chance.sample(WORDS, chance.randrange(4))
            }
            function["parameters"] = {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            }
        if chance.random() < 0.1:
            function["strict"] = True
        return {"type": "function", "function": function}

    def turn(self, messages: list[Json], *, tools: bool) -> None:
        """A user's message and the assistant's answer, perhaps by way of tools."""
        chance = self._chance
        messages.append({"role": "user", "content": self.content()})
        if tools and chance.random() < 0.5:
            calls = [self.call(number) for number in range(chance.choice((1, 1, 2)))]
            content = chance.choice((None, "", self.text()))
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            messages.extend(
                {"role": "tool", "tool_call_id": call["id"], "content": self.text()} for call in calls
            )
        answer: Json = {"role": "assistant", "content": self.content()}
        if self._thinking and chance.random() < 0.3:
            answer["reasoning_content"] = self.text()
        messages.append(answer)

    def request(self) -> Json:
        chance = self._chance
        messages: list[Json] = []
        tools = chance.random() < 0.3
        if chance.random() < 0.4:
            role = "developer" if chance.random() < 0.15 else "system"
            messages.append({"role": role, "content": self.content()})
        for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 4))):
            self.turn(messages, tools=tools)
        messages.append({"role": "user", "content": self.content()})
        body: Json = {"messages": messages}
        if chance.random() < 0.15:
            messages.append({"role": "assistant", "content": self.content()})
        elif chance.random() < 0.05:
            body["add_generation_prompt"] = False
        if chance.random() < 0.1:
            messages[0]["name"] = "bob"
        if tools:
            body["tools"] = [self.tool(name) for name in chance.sample(NAMES, chance.choice((1, 1, 2, 3)))]
            if chance.random() < 0.1:
                body["tool_choice"] = "none"
        if chance.random() < 0.05:
            body["chat_template_kwargs"] = {"enable_thinking": chance.choice((True, False))}
        return body


def requests(count: int, *, seed: int, thinking: bool = True) -> Iterator[Json]:
    """`count` bodies for `/v1/chat/completions`, without `model` and `max_tokens`."""
    writer = Requests(seed, thinking=thinking)
    for _ in range(count):
        yield writer.request()
