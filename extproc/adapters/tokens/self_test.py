"""Texts on which shortcuts are tried against the model's own tokenizer, whenever one is loaded.

The same texts every time. They aim at what splitting expressions and normalizers tell apart: scripts, letters
against marks, digits, contractions, white space of all kinds, line ends, runs of one character, emoji sequences,
composed and decomposed letters, characters from all over Unicode; and at added tokens beside all of these.
"""

# ruff: noqa: RUF001 - look-alikes are what these texts are about

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

from extproc.adapters.tokens.added_tokens import WHITE_SPACE

_SENTENCES = (
    "The river rose overnight, and by noon the lower road was under water.",
    "Don't you'll they're I'm we've he'd it's DON'T YOU'LL THEY'RE I'M WE'VE HE'D IT'S rock'n'roll 'tis o'clock",
    "Der Fluß stieg über Nacht; mittags stand die Straße unter Wasser.",
    "La rivière est montée pendant la nuit : à midi, la route était noyée.",
    "Nehir gece boyunca yükseldi; İstanbul'da ılık bir gün.",
    "Река поднялась за ночь, и к полудню дорога ушла под воду.",
    "Ο ποταμός φούσκωσε τη νύχτα και ο δρόμος πλημμύρισε.",
    "ارتفع النهر ليلًا، وعند الظهر غمر الماء الطريق ١٢٣٤.",
    "הנהר עלה בלילה, ובצהריים הדרך הוצפה.",
    "नदी रात में चढ़ गई और दोपहर तक सड़क डूब गई १२३।",
    "แม่น้ำเอ่อขึ้นในคืนนั้น ถนนจมน้ำตอนเที่ยง ๔๕๖",
    "河水夜里上涨，中午时下面的路已被淹没。第十二章 ２０２４年",
    "川は夜のうちに増水し、昼には下の道が水没した。カタカナもある。",
    "강물이 밤새 불어나 정오에는 아랫길이 물에 잠겼다.",
    "Sông dâng cao trong đêm, đến trưa con đường bị ngập.",
    "def area(r: float) -> float:\n    return 3.14159 * r ** 2  # m^2\n\n\nprint(f'{area(2):,.3f}')\n",
    'for (let i = 0; i < 10; i++) {\n\tconsole.log(`${i}: ${"x".repeat(i)}`);\n}\r\n',
    '{"name": "pump-7", "limits": [0, 1e-9, -12.5, null], "on": true}\n',
    "<ul class='a'>\n  <li>one &amp; two</li>\n</ul>\n",
    "SELECT id, COUNT(*) FROM t WHERE x <> 'a''b' GROUP BY 1;",
    "https://example.org/a/b?c=d&e=%20#f user@example.org C:\\temp\\x.txt ~/.config",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n- [ ] item\n- [x] **bold** _it_ `code`\n",
    "1 12 123 1234 12345 1,234,567.89 0x1F 1e10 ½ ² Ⅷ ٣ ३ 3rd v2.0.1",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇯🇵 🤖🤖 ☺️ ✈ →⇒ ♥",
    "e\u0301 é a\u030a\u0323 Å \u212b \u1100\u1161\u11a8 각 \u03b1\u0313\u0301\u0345",
    "q\u0323\u0307 q\u0307\u0323 ﬁ ſ 'ſ \u2126",
    "\u200b\u200d\ufeff\u00ad\u2060 \u00a0 \u3000 \u2028x\u2029 \x85 \u180e \u202f\x1c\x1d\x1e\x1f",
    "\x00\x01\x02\x7f\x80\x9f \t \v \f \r \n \r\n \n\r",
    "a  b   c    d\n\n\ne \n f\t\tg \t h  \n  \n   i",
    " lead", "trail ", "  two", "two  ", "\nline", "line\n", "\r\n\r\n", "x \n", "x\n ", "!\n", "!\n\n x",
    "SGVsbG8sIHdvcmxkIQ==3q2+7wAB/+9", "AbCdEfGh iJkL MNOP qRsT", "camelCaseWord HTTPServer2Go XMLHttpRequest",
    "...!!!???---___===***###", "«quoted» “quoted” ‘quoted’ „quoted“ 'a' \"b\"",
    "a/b\\c|d a.b.c a,b;c:d (a)[b]{c}<d>",
    "µ ª º ʰ ˢ ᵃ Ⓐ ⒈ ǅ ǈ ß ẞ İ ı ŉ K Å",
)  # fmt: skip

_ALPHABETS = (
    "abc ABC",
    "ab1 2,.\n",
    " \t\n\r\x0b\u00a0\u3000x!",
    "aé\u0301ß\u0327 \u0345q",
    "'sStTdDmMlLrReEvV ’a",
    "0123456789٣३½ a.",
    "你好世界，。 a1\n",
    "あア漢ー々한글 ",
    "🤖👍🏽\u200d\ufe0f🇩🇪a ",
    "abc ABC\t\n\r  'sS’0123456789.,-_=/*你好あ한🤖👩‍👧é\u0301\u200b\u00a0ßİﬁ\x00\x7f",
    "<>|im_startendoftx/ \n",
)

_RUN_CHARACTERS = "aAé你0 \n\t\r^=-_.!#*/'\u0301\u200d\u00a0🤖"
_RUN_LENGTHS = (*range(2, 18), 31, 64, 65, 127, 256, 1001)


def self_test_texts(added_tokens: Sequence[str]) -> list[str]:
    """About 4,100 short texts; those at the end hold `added_tokens`, if there are any."""
    chance = random.Random(20_240_607)  # noqa: S311 - the same texts in every process, on purpose
    texts = ["", *_SENTENCES]
    texts += [character * length for character in _RUN_CHARACTERS for length in _RUN_LENGTHS]
    for _ in range(900):
        alphabet = chance.choice(_ALPHABETS)
        texts.append("".join(chance.choice(alphabet) for _ in range(chance.randrange(1, 48))))
    for start in (*range(0x20, 0x3200, 24), *range(0x3200, 0xD7A0, 0x1A3), *range(0xF900, 0x323B0, 0x717)):
        characters = list(map(chr, range(start, start + 24)))
        texts.append("".join(characters))
        texts.append("".join(f"a{character}" for character in characters))
    for first, last in product(WHITE_SPACE, repeat=2):
        texts.append("".join(f"{first}{last}{other}" for other in ("a", "1", ".", "你", "'s", first)))
    for _ in range(60):
        texts.append(" ".join(chance.choices(_SENTENCES, k=chance.randrange(2, 6))))
    if not added_tokens:
        return texts
    some = (
        added_tokens if len(added_tokens) <= 24 else [*added_tokens[:12], *chance.choices(added_tokens, k=24)]
    )
    around = (
        "",
        " ",
        "  ",
        "\n",
        "a",
        "1",
        "!",
        "é",
        "\u0301",
        "你",
        "\t ",
        "<",
        ".",
        "'s",
        "word ",
        " word",
    )
    for token in some:
        texts += [token, token + token, token[:-1], token[1:], f"<{token}>", token.upper(), f"x{token}\n\ny"]
        texts += [f"{chance.choice(around)}{token}{chance.choice(around)}" for _ in range(6)]
    for _ in range(300):
        parts = [
            chance.choice((*around, chance.choice(_SENTENCES)[:20])) for _ in range(chance.randrange(2, 9))
        ]
        texts.append("".join(part + chance.choice(("", chance.choice(some))) for part in parts))
    return texts
