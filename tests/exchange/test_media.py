"""Images in an exchange: counted by the model's rules, or refused where they stand."""

from __future__ import annotations

import json

from extproc.domain.media import MediaKind, MediaRule
from extproc.exchange.events import CountTokens, Refuse, Reserve, Send
from tests.builders import a_model, a_policy
from tests.exchange.rig import a_body, a_count, a_head, an_exchange, play

BODY = json.dumps(
    {
        "model": "tiny",
        "max_tokens": 100,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}},
                ],
            }
        ],
    }
).encode()


def test_an_image_is_reserved_for_by_its_rule() -> None:
    """The tokens of the rule are input like any other."""
    model = a_model(media={MediaKind.IMAGE: MediaRule(max_tokens=700)})
    exchange = an_exchange(a_policy(models=(model,)))
    effects = play(exchange, a_head(), a_body(BODY), a_count(10))
    assert any(isinstance(effect, CountTokens) for effect in effects)
    (reserve,) = (effect for effect in effects if isinstance(effect, Reserve))
    assert reserve.reservation.input_tokens == 710


def test_an_image_without_a_rule_is_refused() -> None:
    """Nothing is counted or reserved, and the answer names the part."""
    effects = play(an_exchange(), a_head(), a_body(BODY))
    assert not any(isinstance(effect, CountTokens) for effect in effects)
    answers = [effect.answer for effect in effects if isinstance(effect, Send)]
    (refusal,) = (answer for answer in answers if isinstance(answer, Refuse))
    assert refusal.status == 400
    assert refusal.body["error"]["param"] == "messages[0].content[1]"
