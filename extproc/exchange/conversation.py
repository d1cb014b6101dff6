"""What Envoy is owed: every message of its own wants one answer of the same kind, in order.

With a buffered body the head is answered at once (asking for the body, and for the stream to stay open until the
HTTP stream ends), and the decision goes into the answer to the body. Where the body follows without waiting for
that answer (full duplex, or streamed and unasked) the head's answer is held back until the decision, because only
there can headers still change. A streamed body is asked to become a buffered one; if Envoy does not do it, the
pieces are held and answered once the decision has fallen, but the route is then out of our hands, and gated routes
fail closed.
"""

from __future__ import annotations

from extproc.exchange.events import (
    BodyMode,
    Continue,
    Echo,
    Effect,
    Phase,
    RequestBody,
    RequestHeaders,
    Route,
    Send,
)

ECHO_BYTES = 62 * 1024
"""Full-duplex bodies go back in pieces below Envoy's 64 KiB limit on one streamed response."""


class Conversation:
    """One stream's messages that wait for the decision, and the body that came with them."""

    __slots__ = (
        "_body_mode",
        "_chunks",
        "_owed",
        "_silent",
        "body_bytes",
        "full_duplex",
        "response_full_duplex",
    )

    def __init__(self) -> None:
        self._body_mode = BodyMode.BUFFERED
        self._chunks: list[bytes] = []
        self._owed: list[Phase] = []
        self._silent = False
        self.body_bytes = 0
        self.full_duplex = False
        self.response_full_duplex = False

    def begin(self, head: RequestHeaders) -> None:
        """The request's head has come, and with it how Envoy is going to speak."""
        self._body_mode = head.body_mode
        self._silent = head.observe_only
        self.full_duplex = head.body_mode is BodyMode.FULL_DUPLEX_STREAMED
        self.response_full_duplex = head.response_body_mode is BodyMode.FULL_DUPLEX_STREAMED

    def end(self) -> None:
        """Nobody listens any more."""
        self._silent = True

    # What is said at once.

    def answer(self, phase: Phase) -> list[Effect]:
        """Let the message of this phase go on as it is."""
        return [] if self._silent else [Send(answer=Continue(phase=phase))]

    def ask_body(self, head: RequestHeaders) -> list[Effect]:
        """Answer the head now, or owe the answer, if the body follows without it."""
        if self.full_duplex or head.body_unasked:
            self._owed.append(Phase.REQUEST_HEADERS)
            return []
        ask = Continue(phase=Phase.REQUEST_HEADERS, ask_body=True, response_body_mode=head.response_body_mode)
        return [Send(answer=ask)]

    def pass_request_body(self, body: RequestBody) -> list[Effect]:
        """Let a piece of a body go on that nobody here reads."""
        if self.full_duplex:
            return self._echo(Phase.REQUEST_BODY, body.data, end_of_stream=body.end_of_stream)
        return self.answer(Phase.REQUEST_BODY)

    def pass_response_body(self, data: bytes, *, end_of_stream: bool) -> list[Effect]:
        """Let a piece of the response's body go on."""
        if self.response_full_duplex:
            return self._echo(Phase.RESPONSE_BODY, data, end_of_stream=end_of_stream)
        return self.answer(Phase.RESPONSE_BODY)

    # What waits for the decision.

    def hold(self, body: RequestBody) -> bool:
        """Keep a piece of the body, and owe its answer. True when the body is complete with it."""
        if not self.full_duplex:
            self._owed.append(Phase.REQUEST_BODY)
        self.body_bytes += len(body.data)
        self._chunks.append(body.data)
        # A buffered body is one message, whole even when trailers follow it.
        return body.end_of_stream or self._body_mode is BodyMode.BUFFERED

    def is_cut(self, body: RequestBody) -> bool:
        """Whether Envoy has sent less than the body, because it is larger than its own limit."""
        return self._body_mode is BodyMode.BUFFERED_PARTIAL and not body.end_of_stream

    def hold_trailers(self) -> None:
        """The body is complete, and the answer to its trailers is owed too."""
        self._owed.append(Phase.REQUEST_TRAILERS)

    def take_body(self) -> bytes:
        """The whole body. It stays here only if it has to be given back."""
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks = [body] if self.full_duplex else []
        return body

    @property
    def body_can_change(self) -> bool:
        """Whether one answer that is still owed can replace the whole body."""
        whole = self._owed.count(Phase.REQUEST_BODY) == 1 and Phase.REQUEST_HEADERS not in self._owed
        return self.full_duplex or whole

    @property
    def deciding_phase(self) -> Phase:
        """The message whose answer can still change the request's head."""
        head_is_owed = self._owed[:1] == [Phase.REQUEST_HEADERS]
        return Phase.REQUEST_HEADERS if head_is_owed else Phase.REQUEST_BODY

    def change_body(self, body: bytes) -> bytes | None:
        """The new body for the deciding answer; `None` where it goes back in pieces, as all bodies do there."""
        if not self.full_duplex:
            return body
        self._chunks = [body]
        return None

    def decide(self, route: Route) -> list[Effect]:
        """Everything that is owed: the route in the one answer that can still carry it, the others as they are."""
        effects: list[Effect] = []
        routed = False
        for phase in self._owed:
            if phase is route.phase and not routed:
                effects.append(Send(answer=route))
                routed = True
            else:
                effects.append(Send(answer=Continue(phase=phase)))
            if phase is Phase.REQUEST_HEADERS and self.full_duplex:
                last = Phase.REQUEST_TRAILERS not in self._owed
                effects += self._echo(Phase.REQUEST_BODY, b"".join(self._chunks), end_of_stream=last)
        self.forget()
        return effects

    def forget(self) -> None:
        """Nothing is owed any more: the client has been answered in another way, or is gone."""
        self._chunks.clear()
        self._owed.clear()

    def _echo(self, phase: Phase, data: bytes, *, end_of_stream: bool) -> list[Effect]:
        if self._silent:
            return []
        starts = range(0, len(data), ECHO_BYTES) if data else range(1)
        return [
            Send(
                answer=Echo(
                    phase=phase,
                    data=data[start : start + ECHO_BYTES],
                    end_of_stream=end_of_stream and start + ECHO_BYTES >= len(data),
                )
            )
            for start in starts
        ]
