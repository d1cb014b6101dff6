"""The life of one exchange: which events are legal when, and what each one asks for.

Theory
------
An exchange is one HTTP request on one ext_proc stream. It is two conversations at once. With Envoy: every
message of Envoy's wants exactly one answer of the same kind, in order, and what may be in an answer depends
on how Envoy sends bodies. With ourselves: read the body, count it, reserve, forward or refuse, and release
when the stream ends. What Envoy is owed is kept in `conversation`; when it is paid is decided here.

Departures. A stream may end, or a local reply of Envoy's (its own 413, a timeout) may begin, at any moment:
the client then needs no decision any more. Two answers may still be owed to us, the counter's and the
ledger's. They always arrive, so the exchange waits for them alone; a grant that arrives then is given back at
once, as if it had never been made.

Waiting. The ledger may take its time when there is no room: the exchange is then held in RESERVING, still
reading. Whatever ends the need for an answer (a departure, a local reply, a fault, a drain) withdraws the
request from the line, so that nobody waits behind it.

Fallbacks. A request that finds no room may go elsewhere: to another pool, with another model in its body, or
to another gateway. The policy's places are tried in order, each once, and without another wait: they are for
what has room at once. One question is open at a time, so everything above holds for each of them. If none
helps, the client is told what it would have been told without them.

Law: every grant is released exactly once. Every request message is answered at most once, and nothing is
sent after a refusal or after the stream's end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from extproc.dialects.body import Body, BodyRead, BodyRefused, refused, understood
from extproc.dialects.reading import LARGEST_COUNT, BadRequest, Dialect, InferenceRequest
from extproc.dialects.registry import dialect_for
from extproc.dialects.rewriting import LARGEST_CHANGED_BYTES, with_model
from extproc.domain.admission import FALLBACK_REASONS, Plan, Screened, context_refusal, denial, plan
from extproc.domain.contract import (
    REDIRECT_STATUS,
    Refusal,
    refusal_headers,
)
from extproc.domain.deadline import declared_deadline_ms
from extproc.domain.decision import Decision
from extproc.domain.identity import identify
from extproc.domain.load import LoadBook
from extproc.domain.outcome import Outcome
from extproc.domain.policy import (
    Fallback,
    Lane,
    Limits,
    Model,
    ModelFallback,
    Policy,
    Pool,
    PoolFallback,
    Posture,
    RegionFallback,
    Tenant,
)
from extproc.domain.prompt import AtLeast, Counted, CountFailed
from extproc.domain.reservation import Denied, Granted, Unavailable
from extproc.domain.retries import RetryBook, is_marked
from extproc.domain.trace_context import nearest, trace_context
from extproc.exchange import refusals
from extproc.exchange.conversation import Conversation
from extproc.exchange.events import (
    CloseStream,
    CountTokens,
    DrainBegan,
    Effect,
    Event,
    Faulted,
    Observe,
    Phase,
    ReadBody,
    Refuse,
    Release,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    Reserve,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Route,
    Send,
    StreamEnded,
    Withdraw,
)
from extproc.exchange.headers import (
    FALLBACK_HEADER,
    accounting_headers,
    address_of,
    declared_lane,
    foreign_headers,
    safe_request_id,
    spread_of,
)
from extproc.exchange.law import LEAVES, PASSES, TRANSITIONS, ProtocolViolation, State

LONGEST_HOLD_MS = 3_600_000
"""Longer than any policy lets a request wait; what an Envoy allows that does not say how long it waits."""

ANSWER_MS = 250
"""What an answer may need to reach Envoy: a hold ends so much before Envoy's patience does."""

_UNDECIDED = (State.READING, State.PARSING, State.COUNTING, State.RESERVING)

WAITS = frozenset({"retry-after", "retry-after-ms", "x-should-retry"})
"""Headers of a refusal that a redirect has not: it is to be followed at once."""

ReadJson = Callable[[bytes, Mapping[str, str], Limits], Mapping[str, Any] | None]
"""Bytes and request headers to the body's JSON object; raises `BadRequest`. `None`: too long to be read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstChoice:
    """What the client asked for and did not get, kept while fallbacks are tried."""

    model: Model
    request: InferenceRequest
    count: Counted
    lane: Lane
    pool: Pool
    plan: Plan | None
    refusal: Refusal


class Exchange:
    """One exchange. Feed it events; do what it asks, in order; feed the answers back."""

    def __init__(
        self,
        *,
        policy: Policy,
        lease_id: str,
        read_json: ReadJson,
        draining: bool = False,
        retries: RetryBook | None = None,
        load: LoadBook | None = None,
    ) -> None:
        self.state = State.START
        self.policy = policy
        self.lease_id = lease_id
        self._read_json = read_json
        self._draining = draining
        self._retries = retries
        self._load = load
        self._caller_key = 0
        self._named_key: int | None = None
        self._body_key: int | None = None
        self._arrived_us = 0
        self._read_us: int | None = None
        self._counted_us: int | None = None
        self._reserved_us: int | None = None
        self._now_us = 0
        self._head: RequestHeaders | None = None
        self._request_id = lease_id
        self._spread = 0
        self._envoy = Conversation()
        self._dialect: Dialect | None = None
        self._tenant: Tenant | None = None
        self._model: Model | None = None
        self._request: InferenceRequest | None = None
        self._instead: Mapping[str, InferenceRequest] = {}  # the same for the models of fallbacks
        self._declared_lane: Lane | None = None
        self._declared_deadline_ms: int | None = None
        self._lane: Lane | None = None
        self._plan: Plan | None = None
        self._planned_us = 0
        self._count: Counted | None = None
        self._raw: bytes | None = None  # the body, where a fallback may name another model in it
        self._first: _FirstChoice | None = None
        self._fallbacks: list[Fallback] = []  # that have not been tried
        self._fallback: Fallback | None = None  # that is being tried
        self._new_body: bytes | None = None
        self._held = False

    def receive(self, event: Event, now_us: int) -> list[Effect]:
        """What has to be done now that `event` has happened.

        Raises `ProtocolViolation` when the law does not allow the event; the exchange is then unchanged.
        """
        before = self.state
        allowed = TRANSITIONS[before].get(type(event))
        if allowed is None:
            raise ProtocolViolation(f"{type(event).__name__} is not legal while {before.name}")
        self._now_us = now_us
        try:
            effects = self._HANDLERS[type(event)](self, event, before)
        except BaseException:
            self.state = before
            raise
        if self.state not in allowed:
            led_to, self.state = self.state, before
            raise ProtocolViolation(f"{type(event).__name__} led from {before.name} to {led_to.name}")
        return effects

    # Reading the request.

    def _on_request_headers(self, head: RequestHeaders, _before: State) -> list[Effect]:
        self._arrived_us = self._now_us
        self._head = head
        self._envoy.begin(head)
        dialect = dialect_for(head.path) if head.method == "POST" else None
        if dialect is None or head.observe_only:
            self.state = State.PASSING
            return self._envoy.answer(Phase.REQUEST_HEADERS)
        self._dialect = dialect
        self._request_id = safe_request_id(head.headers.get("x-request-id")) or self.lease_id
        self._spread = spread_of(self._request_id)

        tenant = identify(self.policy, headers=head.headers, metadata=head.metadata)
        if isinstance(tenant, Refusal):
            return self._refuse(tenant)
        self._tenant = tenant
        names = self.policy.request_headers
        self._declared_lane = declared_lane(head.headers.get(names.intent))
        self._declared_deadline_ms = declared_deadline_ms(head.headers, header=names.deadline_ms)
        if self._draining:
            return self._refuse(refusals.drained(self._spread))
        penalty = self._retry_penalty(tenant.id, head.headers)
        if penalty is not None:
            return self._refuse(penalty)
        length = head.headers.get("content-length", "")
        if length.isascii() and length.isdecimal() and int(length[:20]) > self.policy.limits.body_bytes:
            return self._refuse(refusals.too_large(self.policy.limits.body_bytes))
        if head.end_of_stream:
            return self._refuse(refusals.NO_BODY)

        self.state = State.READING
        return self._envoy.ask_body(head)

    def _on_request_body(self, event: RequestBody, before: State) -> list[Effect]:
        if before is State.PASSING:
            return self._envoy.pass_request_body(event)
        if before is State.REFUSED:
            return []
        complete = self._envoy.hold(event)
        if self._envoy.is_cut(event) or self._envoy.body_bytes > self.policy.limits.body_bytes:
            return self._refuse(refusals.too_large(self.policy.limits.body_bytes))
        return self._on_body_complete() if complete else []

    def _on_request_trailers(self, _event: RequestTrailers, before: State) -> list[Effect]:
        if before is State.REFUSED:
            return []
        if before in (State.PASSING, State.FORWARDED):
            return self._envoy.answer(Phase.REQUEST_TRAILERS)
        self._envoy.hold_trailers()
        return self._on_body_complete() if before is State.READING else []

    def _on_body_complete(self) -> list[Effect]:
        assert self._head is not None and self._dialect is not None and self._tenant is not None  # noqa: PT018
        self._read_us = self._now_us
        raw = self._envoy.take_body()
        if self._retries is not None:
            self._body_key = self._retries.body_key(self._caller_key, raw)
            penalty = self._retries.opened(self._body_key, self.policy.retries, self._now_us // 1000)
            if penalty is not None:
                return self._refuse(refusals.penalized(penalty, self._spread))
        body = Body(
            raw=raw,
            headers=self._head.headers,
            path=self._head.path,
            dialect=self._dialect,
            policy=self.policy,
            renamable=len(raw) <= LARGEST_CHANGED_BYTES and self._body_can_change,
        )
        try:
            value = self._read_json(raw, body.headers, self.policy.limits)
        except BadRequest as bad:
            return self._on_body_refused(refused(bad), State.PARSING)
        if body.renamable:
            self._raw = raw
        if value is None:
            self.state = State.PARSING
            return [ReadBody(body=body, tenant=self._tenant.id)]
        read = understood(body, value)
        if isinstance(read, BodyRefused):
            return self._on_body_refused(read, State.PARSING)
        return self._on_body_read(read, State.PARSING)

    def _on_body_read(self, read: BodyRead, before: State) -> list[Effect]:
        if before is not State.PARSING:
            return self._nobody_waits(before)
        self._request = read.request
        self._instead = read.instead
        if not read.instead:
            self._raw = None
        return self._count_with(read.model)

    def _on_body_refused(self, event: BodyRefused, before: State) -> list[Effect]:
        if before is not State.PARSING:
            return self._nobody_waits(before)
        return self._refuse(event.refusal)

    def _nobody_waits(self, before: State) -> list[Effect]:
        """The reader's or the counter's answer has come too late to matter."""
        if before is State.COUNTING_ALONE:
            self.state = State.CLOSED
        return []

    @property
    def _body_can_change(self) -> bool:
        """Can another model be named in the body? Compressed ones stay what they are."""
        assert self._head is not None
        coding = self._head.headers.get("content-encoding", "identity").strip().lower()
        return coding in ("", "identity") and self._envoy.body_can_change

    # Deciding.

    def _count_with(self, model: Model) -> list[Effect]:
        assert self._request is not None and self._tenant is not None  # noqa: PT018
        self._model = model
        self.state = State.COUNTING
        return [
            CountTokens(
                model=model.name,
                prompt=self._request.prompt,
                limit_tokens=model.context_tokens if self._request.truncation is None else LARGEST_COUNT,
                tenant=self._tenant.id,
            )
        ]

    def _on_count(self, count: Counted | AtLeast | CountFailed, before: State) -> list[Effect]:
        if before is State.PARSING:
            assert isinstance(count, CountFailed)
            return self._refuse(refusals.uncounted(count, self._spread))
        if before is not State.COUNTING:
            return self._nobody_waits(before)
        assert self._model is not None
        if self._counted_us is None:
            self._counted_us = self._now_us
        if isinstance(count, CountFailed):
            return self._fall_back_or_refuse(refusals.uncounted(count, self._spread))
        if isinstance(count, AtLeast):
            refusal = context_refusal(self._model, input_tokens=count.input_tokens, exact=False)
            return self._fall_back_or_refuse(refusal)
        self._count = count
        planned = self._planned(count)
        self._lane = planned.lane
        if isinstance(planned, Screened):
            self._plan = planned.plan
            return self._fall_back_or_refuse(planned.refusal)
        return self._reserve(planned)

    def _planned(self, count: Counted, pool: Pool | None = None) -> Plan | Screened:
        """What the request would hold of its model, in `pool` if there is one to be had instead."""
        assert self._model is not None and self._request is not None and self._tenant is not None  # noqa: PT018
        planned = plan(
            self._request.input_tokens(count.per_sequence_tokens, context_tokens=self._model.context_tokens),
            output_limit_tokens=self._request.output_limit_tokens,
            choices=self._request.choices,
            policy=self.policy,
            model=self._model,
            tenant=self._tenant,
            declared_lane=self._declared_lane,
            declared_deadline_ms=self._declared_deadline_ms,
            elapsed_ms=(self._now_us - self._arrived_us) // 1000,
            lease_id=self.lease_id,
            spread=self._spread,
            pool=pool,
        )
        if self._load is None or isinstance(planned, Screened):
            return planned
        return self._load.screen(planned, spread=self._spread, now_ms=self._now_us // 1000)

    def _reserve(self, planned: Plan) -> list[Effect]:
        self._plan = planned
        self._lane = planned.lane
        self._planned_us = self._now_us
        self.state = State.RESERVING
        if self._reserved_us is None:
            self._reserved_us = self._now_us
        # Whoever falls back has had its wait, or no place to wait in.
        reservation = planned.reservation
        longest_ms = self._longest_hold_ms() if self._first is None else 0
        if reservation.hold_ms > longest_ms:
            reservation = replace(reservation, hold_ms=longest_ms)
        return [Reserve(reservation=reservation)]

    def _fall_back_or_refuse(self, refusal: Refusal) -> list[Effect]:
        """Go to the next place that the policy names for want of room here; else say what was said first."""
        if self._first is None:
            assert self._model is not None
            model, lane = self._model, self._lane
            request, count = self._request, self._count
            if refusal.reason not in FALLBACK_REASONS or not model.fallbacks:
                return self._refuse(refusal)
            assert lane is not None and request is not None and count is not None  # noqa: PT018
            self._fallbacks = list(model.fallbacks)
            self._first = _FirstChoice(
                model=model,
                request=request,
                count=count,
                lane=lane,
                pool=self.policy.pools[model.lanes[lane]],
                plan=self._plan,
                refusal=refusal,
            )
        first = self._first
        while self._fallbacks:
            fallback = self._fallbacks.pop(0)
            effects = self._fall_back(fallback, first)
            if effects is not None:
                return effects
        self._back_to(first)
        return self._refuse(first.refusal)

    def _fall_back(self, fallback: Fallback, first: _FirstChoice) -> list[Effect] | None:
        """What it takes to try `fallback`; `None` if it is of no use to this request."""
        self._back_to(first)
        self._fallback = fallback
        match fallback:
            case PoolFallback():
                pool = self.policy.pools[fallback.pool]
                planned = self._planned(first.count, pool)
                if pool is first.pool or isinstance(planned, Screened):
                    return None
                return self._reserve(planned)
            case ModelFallback():
                request = self._instead.get(fallback.model)
                if request is None or self._raw is None:
                    return None
                self._new_body = with_model(self._raw, fallback.model)
                if self._new_body is None:
                    return None
                self._request, self._plan = request, None
                return self._count_with(self.policy.models[fallback.model])
            case RegionFallback():
                assert self._head is not None
                if not self._head.path.startswith("/"):
                    return None
                return self._refuse(first.refusal, location=fallback.origin + self._head.path)

    def _back_to(self, first: _FirstChoice) -> None:
        self._model, self._request = first.model, first.request
        self._lane, self._plan = first.lane, first.plan
        self._fallback = self._new_body = None

    def _on_granted(self, granted: Granted, before: State) -> list[Effect]:
        if before is not State.RESERVING:
            if before is State.RESERVING_ALONE:
                self.state = State.CLOSED
            return [Release(lease_id=granted.lease_id, unused=True)]
        assert self._plan is not None
        pool, now_ms = self._plan.pool.name, self._now_us // 1000
        if self._load is not None and not self._load.granted(pool, granted.replica, now_ms):
            # The replica has gone while the request waited for it.
            gone = refusals.engine_gone(
                self._load.wait_ms(pool, now_ms), self._spread, waited_ms=granted.waited_ms
            )
            return [Release(lease_id=self.lease_id, unused=True), *self._refuse(gone)]
        self._held = True
        return self._forward(granted)

    def _on_denied(self, denied: Denied, before: State) -> list[Effect]:
        if before is not State.RESERVING:
            if before is State.RESERVING_ALONE:
                self.state = State.CLOSED
            return []
        assert self._plan is not None and self._tenant is not None  # noqa: PT018
        refusal = denial(denied, plan=self._plan, tenant=self._tenant, spread=self._spread)
        return self._fall_back_or_refuse(refusal)

    def _on_unavailable(self, unavailable: Unavailable, before: State) -> list[Effect]:
        if before is not State.RESERVING:
            if before is State.RESERVING_ALONE:
                self.state = State.CLOSED
            # The grant may have been made and its answer lost: giving back what is unknown is harmless.
            return [Release(lease_id=self.lease_id, unused=True)]
        assert self._plan is not None
        if self.policy.lanes[self._plan.lane].posture is Posture.OPEN:
            return [Release(lease_id=self.lease_id), *self._forward(None)]
        refusal = refusals.without_ledger(unavailable.wait_ms, self._spread)
        # What may still be held under this id must not be asked for again; another region has other books.
        self._fallbacks = [one for one in self._fallbacks if isinstance(one, RegionFallback)]
        return [Release(lease_id=self.lease_id, unused=True), *self._fall_back_or_refuse(refusal)]

    def _forward(self, granted: Granted | None) -> list[Effect]:
        assert self._plan is not None and self._head is not None  # noqa: PT018
        self.state = State.FORWARDED
        planned = self._plan
        decision = self._decision(Outcome.ADMITTED, granted=granted, fallback=self._fallback)
        left_ms = planned.reservation.deadline_in_ms - (self._now_us - self._planned_us) // 1000
        set_headers = accounting_headers(planned, granted, left_ms, self._fallback)
        body = self._new_body
        self._raw = self._new_body = None
        if body is not None and "content-length" in self._head.headers:
            set_headers = (*set_headers, ("content-length", str(len(body))))
        route = Route(
            phase=self._envoy.deciding_phase,
            set_headers=set_headers,
            remove_headers=foreign_headers(self._head.headers, set_headers),
            endpoint=address_of(planned.pool.replicas, granted),
            decision=decision,
            body=None if body is None else self._envoy.change_body(body),
        )
        return [*self._envoy.decide(route), Observe(decision=decision)]

    def _refuse(self, refusal: Refusal, *, location: str | None = None) -> list[Effect]:
        """Answer the client with the refusal; or send it to `location`, with the refusal as the reason."""
        assert self._dialect is not None
        self.state = State.REFUSED
        self._envoy.forget()
        self._raw = self._new_body = None
        told_to_wait = refusal.retry_after_ms is not None and location is None
        if self._retries is not None and told_to_wait and self._caller_key:
            assert refusal.retry_after_ms is not None
            self._retries.refused(
                caller=self._caller_key,
                named=self._named_key,
                body=self._body_key,
                wait_ms=refusal.retry_after_ms,
                rules=self.policy.retries,
                now_ms=self._now_us // 1000,
            )
        decision = self._decision(
            Outcome.REFUSED, refusal=refusal, fallback=None if location is None else self._fallback
        )
        headers = refusal_headers(
            refusal,
            lane=str(self._lane) if self._lane is not None else None,
            policy_version=self.policy.version,
            request_id=self._request_id,
        )
        if location is not None and self._fallback is not None:
            headers = [(name, value) for name, value in headers if name not in WAITS]
            headers += (("location", location), (FALLBACK_HEADER, self._fallback.label))
        answer = Refuse(
            status=refusal.row.status if location is None else REDIRECT_STATUS,
            headers=(("content-type", "application/json"), *headers),
            body=self._dialect.error_body(refusal, self._request_id),
            decision=decision,
        )
        return [Send(answer=answer), Observe(decision=decision)]

    # The response's side, and every kind of end.

    def _on_response_headers(self, event: ResponseHeaders, before: State) -> list[Effect]:
        self._envoy.response_full_duplex |= event.full_duplex
        if before is State.REFUSED:
            return []
        effects: list[Effect] = []
        if before is State.START:
            self.state = State.PASSING
        elif before in _UNDECIDED:
            # A local reply: Envoy has answered the client itself and waits for us before it can say so.
            effects.append(self._abandon(PASSES[before]))
            effects.extend(self._withdraw(before))
        return [*self._envoy.answer(Phase.RESPONSE_HEADERS), *effects]

    def _on_response_body(self, event: ResponseBody, before: State) -> list[Effect]:
        if before is State.REFUSED:
            return []
        return self._envoy.pass_response_body(event.data, end_of_stream=event.end_of_stream)

    def _on_response_trailers(self, _event: ResponseTrailers, before: State) -> list[Effect]:
        return [] if before is State.REFUSED else self._envoy.answer(Phase.RESPONSE_TRAILERS)

    def _on_stream_ended(self, _event: StreamEnded, before: State) -> list[Effect]:
        self._envoy.end()
        self._forget_body()
        if before in (State.COUNTING_ALONE, State.RESERVING_ALONE):
            return []
        if before in _UNDECIDED:
            return [self._abandon(LEAVES[before]), *self._withdraw(before)]
        self.state = State.CLOSED
        return self._release()

    def _on_drain(self, _event: DrainBegan, before: State) -> list[Effect]:
        self._draining = True
        if before is State.RESERVING:
            return [*self._refuse(refusals.drained(self._spread)), *self._withdraw(before)]
        if before not in (State.FORWARDED, State.PASSING):
            return []
        # Past admission Envoy needs us no more. The lease stays: the engine still works on the answer, and
        # whoever gets the access-log record gives it back.
        self.state = State.CLOSED
        self._envoy.end()
        self._held = False
        self._forget_body()
        return [CloseStream()]

    def _on_fault(self, _event: Faulted, before: State) -> list[Effect]:
        if before not in (State.START, *_UNDECIDED):
            return []
        if self._dialect is None:
            # Nothing is known of the request, so nothing can be answered; a clean end would let it pass.
            self.state = State.REFUSED
            return [CloseStream(failed=True)]
        return [*self._release(), *self._refuse(refusals.our_fault(self._spread)), *self._withdraw(before)]

    def _abandon(self, after: State) -> Effect:
        self.state = after
        self._envoy.forget()
        self._raw = self._new_body = None
        return Observe(decision=self._decision(Outcome.ABANDONED))

    def _release(self) -> list[Effect]:
        if not self._held:
            return []
        self._held = False
        return [Release(lease_id=self.lease_id)]

    # Small parts.

    def _retry_penalty(self, tenant: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why this retry is refused before its body is read, if it is."""
        if self._retries is None:
            return None
        caller = self._retries.caller_key(tenant, headers)
        self._named_key = self._retries.named_key(tenant, headers)
        penalty = self._retries.arrived(
            tenant=tenant,
            caller=caller,
            named=self._named_key,
            marked=is_marked(headers),
            rules=self.policy.retries,
            now_ms=self._now_us // 1000,
        )
        self._caller_key = caller
        return None if penalty is None else refusals.penalized(penalty, self._spread)

    def _forget_body(self) -> None:
        if self._retries is not None and self._body_key is not None:
            self._retries.closed(self._body_key)
            self._body_key = None

    def _longest_hold_ms(self) -> int:
        """How long this stream can be kept waiting at all.

        A worker that is about to stop keeps nobody waiting. An Envoy that gives up earlier than the lane does
        would answer 504, which clients retry at once: the refusal has to be there before.
        """
        assert self._head is not None
        if self._draining:
            return 0
        timeout_ms = self._head.message_timeout_ms
        if timeout_ms is None or self._read_us is None:
            return LONGEST_HOLD_MS
        spent_ms = (self._now_us - self._read_us) // 1000
        return max(0, timeout_ms - spent_ms - ANSWER_MS)

    def _withdraw(self, before: State) -> list[Effect]:
        """Give up the place in line, if there may be one."""
        return [Withdraw(lease_id=self.lease_id)] if before is State.RESERVING else []

    def _decision(
        self,
        outcome: Outcome,
        *,
        refusal: Refusal | None = None,
        granted: Granted | None = None,
        fallback: Fallback | None = None,
    ) -> Decision:
        planned = self._plan
        return Decision(
            outcome=outcome,
            lease_id=self.lease_id,
            reason=refusal.reason if refusal is not None else None,
            tenant=self._tenant.id if self._tenant is not None else None,
            tier=self._tenant.tier.name if self._tenant is not None else None,
            model=self._model.name if self._model is not None else None,
            lane=self._lane,
            pool=planned.pool.name if planned is not None else None,
            replica=granted.replica if granted is not None else None,
            dialect=self._dialect.name if self._dialect is not None else None,
            stream=self._request is not None and self._request.stream,
            input_tokens=(
                planned.demand.input_tokens if planned else refusal.input_tokens if refusal else None
            ),
            output_tokens=(
                planned.demand.output_tokens if planned else refusal.output_tokens if refusal else None
            ),
            work_units=planned.reservation.work_units if planned is not None else None,
            deadline_ms=planned.deadline_ms if planned is not None else None,
            retry_after_ms=refusal.retry_after_ms if refusal is not None else None,
            predicted_ttft_ms=granted.ttft_ms if granted is not None else None,
            waited_ms=self._waited_ms(refusal, granted),
            fallback=None if fallback is None else fallback.label,
            policy_version=self.policy.version,
            read_us=self._read_us - self._arrived_us if self._read_us is not None else None,
            counted_us=self._counted_us - self._arrived_us if self._counted_us is not None else None,
            decided_us=self._now_us - self._arrived_us,
            refusal=refusal,
            trace=(
                nearest(trace_context(self._head.headers), self._head.stream_trace)
                if self._head is not None
                else None
            ),
        )

    def _waited_ms(self, refusal: Refusal | None, granted: Granted | None) -> int | None:
        """The ledger's own account of the wait; where it had none to give, what this exchange saw of it."""
        if granted is not None:
            waited_before_ms = 0 if self._first is None else self._first.refusal.waited_ms or 0
            return waited_before_ms + granted.waited_ms
        if refusal is not None and refusal.waited_ms is not None:
            return refusal.waited_ms
        return None if self._reserved_us is None else (self._now_us - self._reserved_us) // 1000

    _HANDLERS: ClassVar[Mapping[type[Event], Callable[[Exchange, Any, State], list[Effect]]]] = {
        RequestHeaders: _on_request_headers,
        RequestBody: _on_request_body,
        RequestTrailers: _on_request_trailers,
        BodyRead: _on_body_read,
        BodyRefused: _on_body_refused,
        Counted: _on_count,
        AtLeast: _on_count,
        CountFailed: _on_count,
        Granted: _on_granted,
        Denied: _on_denied,
        Unavailable: _on_unavailable,
        ResponseHeaders: _on_response_headers,
        ResponseBody: _on_response_body,
        ResponseTrailers: _on_response_trailers,
        StreamEnded: _on_stream_ended,
        DrainBegan: _on_drain,
        Faulted: _on_fault,
    }
    """What each event leads to; `TRANSITIONS` has when it may happen."""
