"""`extproc simulate`: the effect that admission control is for, and the report that shows it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from extproc.cli import build_app
from extproc.domain.policy import Lane
from extproc.sim.charts import HEIGHT, WIDTH, Axis, Line, line_chart
from extproc.sim.comparison import Compared, Role, duration, effects_of
from extproc.sim.fleet import Run
from extproc.sim.measures import Measured, Targets, measure
from tests.builders import a_policy

ROOT = Path(__file__).parent.parent.parent
TRACES = ROOT / "tests" / "data" / "traces"
POLICY = ROOT / "deploy" / "policies" / "simulate.yaml"

CHATS = (
    f"{TRACES / 'azure_llm_2023_conv.csv.gz'},"
    "tenant=chat-a:2+chat-b,lane=interactive,rate=1.5,limit=1000,timeout=60"
)
FLOOD = (
    f"poisson:5,name=flood,lengths={TRACES / 'mooncake_fast25_conversation.jsonl.gz'},"
    "tenant=docs-a:3+docs-b,lane=bulk,limit=2000,attempts=6,timeout=60"
)
ENGINES = (
    "--engine=prefill_tokens_per_s=8000",
    "--engine=step_base_us=20000",
    "--engine=step_per_sequence_us=250",
)


def simulate(*arguments: str) -> Result:
    """The command's answer."""
    return CliRunner().invoke(build_app(), ["simulate", *arguments])


@pytest.fixture(scope="module")
def effect(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Result]:
    """The documented comparison, five minutes of it: JSON, HTML and what was printed."""
    folder = tmp_path_factory.mktemp("simulate")
    result = simulate(
        f"--policy={POLICY}",
        f"--trace={CHATS}",
        f"--law={FLOOD}",
        *ENGINES,
        "--seconds=300",
        "--without-bulk",
        "--no-control",
        "--request-limit=128",
        f"--json={folder / 'out.json'}",
        f"--html={folder / 'out.html'}",
    )
    assert result.exit_code == 0, result.output
    return json.loads((folder / "out.json").read_text()), (folder / "out.html").read_text(), result


def run_of(document: dict[str, Any], role: Role) -> dict[str, Any]:
    """The figures of the run that is compared as this."""
    (found,) = (run["measured"] for run in document["runs"] if run["role"] == role)
    assert isinstance(found, dict)
    return found


def test_people_hardly_notice_the_flood(effect: tuple[dict[str, Any], str, Result]) -> None:
    """With bulk at twice what the engines can do, interactive TTFT p99 is at most 1.2 times that without bulk."""
    own, alone = run_of(effect[0], Role.POLICY), run_of(effect[0], Role.WITHOUT_BULK)
    assert (
        own["lanes"]["interactive"]["offered_requests"] == alone["lanes"]["interactive"]["offered_requests"]
    )
    assert (
        own["lanes"]["interactive"]["ttft_ms"]["p99"] <= 1.2 * alone["lanes"]["interactive"]["ttft_ms"]["p99"]
    )
    assert own["lanes"]["interactive"]["goodput_requests_permille"] >= 990


def test_without_control_the_same_flood_is_a_collapse(effect: tuple[dict[str, Any], str, Result]) -> None:
    """Without admission control p99 is tens of times as long, and engines do work again that they had done."""
    own, free = run_of(effect[0], Role.POLICY), run_of(effect[0], Role.NO_CONTROL)
    assert free["lanes"]["interactive"]["ttft_ms"]["p99"] > 20 * own["lanes"]["interactive"]["ttft_ms"]["p99"]
    assert free["preemptions"] > 0
    assert own["preemptions"] == 0


def test_bulk_gets_its_floor(effect: tuple[dict[str, Any], str, Result]) -> None:
    """While it waits, bulk has at least its floor of what is let through."""
    own = run_of(effect[0], Role.POLICY)
    assert effect[0]["bulk_floor_permille"] == 200
    assert own["bulk_waiting_share_permille"] >= 200


def test_goodput_over_offered_is_higher_than_without(effect: tuple[dict[str, Any], str, Result]) -> None:
    """More of the offered requests are good than with no control, and than with a limit of requests."""
    document = effect[0]
    own = run_of(document, Role.POLICY)["total"]
    for role in (Role.NO_CONTROL, Role.REQUEST_LIMIT):
        other = run_of(document, role)["total"]
        assert own["offered_requests"] == other["offered_requests"]
        assert own["goodput_requests_permille"] > 1.5 * other["goodput_requests_permille"]
        assert own["goodput_permille"] > other["goodput_permille"]


def test_tenants_are_treated_alike(effect: tuple[dict[str, Any], str, Result]) -> None:
    """A tenant with three times another's flood gets no more than its max-min share."""
    assert min(run_of(effect[0], Role.POLICY)["fairness_permille"].values()) > 980


def test_every_request_comes_to_one_end(effect: tuple[dict[str, Any], str, Result]) -> None:
    """In every run the fates of a lane add up to what was offered, and its tenants to the lane."""
    for run in effect[0]["runs"]:
        for lane, figures in run["measured"]["lanes"].items():
            ends = ("served_requests", "refused_requests", "hung_up_requests", "unfinished_requests")
            assert sum(figures[end] for end in ends) == figures["offered_requests"]
            tenants = run["measured"]["tenants"][lane].values()
            assert sum(tenant["offered_tokens"] for tenant in tenants) == figures["offered_tokens"]


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}]
        if tag not in {"meta", "br", "link", "img"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_needs_nothing_else(effect: tuple[dict[str, Any], str, Result]) -> None:
    """One well-formed page without scripts, links or loaded parts, with a chart for everything over time."""
    html = effect[1]
    page = Page(html)
    assert page.open == []
    assert page.links == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "url(" not in html
    assert "@import" not in html
    assert page.tags.count("svg") >= 12
    assert "prefers-color-scheme: dark" in html
    for text in (
        "Goodput over offered",
        "Refusals by reason",
        "Age of the oldest in line",
        "chat-a",
        "docs-b",
    ):
        assert text in html


def test_the_table_says_it_too(effect: tuple[dict[str, Any], str, Result]) -> None:
    """The terminal shows the figures and the judgement."""
    printed = effect[2].output
    assert "interactive TTFT p99" in printed
    assert re.search(r"yes\s+Bulk makes interactive TTFT p99 at most 1.2 times as long", printed)


SMALL = ("--seconds=20", "--law=poisson:5,tenant=chat-a,input=50-900,output=5-90,limit=100")


def test_a_seed_is_a_result(tmp_path: Path) -> None:
    """The same command writes the same bytes; another seed does not."""
    written: list[bytes] = []
    for number, seed in enumerate((4, 4, 5)):
        out = tmp_path / f"{number}.json"
        result = simulate(f"--policy={POLICY}", *SMALL, f"--seed={seed}", f"--json={out}", "--no-control")
        assert result.exit_code == 0, result.output
        written.append(out.read_bytes())
    assert written[0] == written[1]
    assert written[0].replace(b'"seed": 4', b'"seed": 5') != written[2]


def test_another_policy_is_compared_side_by_side(tmp_path: Path) -> None:
    """A policy that lets nothing wait and holds less refuses where the first does not."""
    other = tmp_path / "tight.yaml"
    text = POLICY.read_text().replace("../../extproc", str(ROOT / "extproc"))
    other.write_text(text.replace("residence_ms: 3s", "residence_ms: 0").replace("260_000", "3_000"))
    out = tmp_path / "out.json"
    result = simulate(
        f"--policy={POLICY}",
        "--seconds=20",
        "--law=poisson:40,tenant=chat-a,input=900,output=90,limit=1000,attempts=1",
        f"--compare={other}",
        f"--json={out}",
    )
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert [run["measured"]["name"] for run in document["runs"]] == ["simulate", "tight"]
    assert run_of(document, Role.POLICY)["refusals"] == {}
    assert run_of(document, Role.OTHER_POLICY)["refusals"].keys() == {"token_budget_exhausted"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "nothing to simulate"),
        (("--law=poisson:1,tenant=nobody,input=1,output=1",), "no tenant 'nobody'"),
        (("--law=poisson:1,tenant=chat-a",), "lengths=FILE"),
        (("--trace=missing.csv,tenant=chat-a",), "missing.csv"),
        ((SMALL[1], SMALL[1]), "two streams are called"),
        ((*SMALL, "--engine=speed=9"), "prefill_tokens_per_s"),
        ((*SMALL, "--engine=max_num_seqs=0"), "max_num_seqs is 0"),
        ((*SMALL, "--compare=missing.yaml"), "missing.yaml"),
    ],
)
def test_what_cannot_be_simulated_is_said(arguments: tuple[str, ...], named: str) -> None:
    """A wrong argument ends the command with 2 and one line that names it."""
    result = simulate(f"--policy={POLICY}", *arguments)
    assert result.exit_code == 2
    assert named in result.output
    assert "Traceback" not in result.output


def a_measured(name: str = "x") -> Measured:
    """The figures of a run in which nothing happened."""
    nothing = Run(
        records=(),
        refusals=(),
        grants=(),
        fallbacks={},
        samples=(),
        ended_us=0,
        preemptions=0,
        prefill_tokens=0,
        prompt_tokens=0,
    )
    targets = Targets(ttft_ms=dict.fromkeys(Lane, 1), itl_ms=None)
    return measure(nothing, name=name, policy=a_policy(), targets=targets, seconds=10, interval_s=1)


def test_no_claim_is_made_of_nothing() -> None:
    """Runs without requests prove nothing."""
    runs = tuple(Compared(role=role, measured=a_measured(role)) for role in Role)
    assert effects_of(runs, bulk_floor_permille=100) == ()


def test_a_chart_keeps_its_lines_inside_and_breaks_them_where_nothing_is() -> None:
    """Points lie within the frame, a gap splits a line, and a lone value is a dot."""
    line = Line(name="<a>", style="c-policy", values=[1, 10, None, 100_000, None, 5, 7])
    svg = line_chart([line], interval_s=60, axis=Axis(say=duration, logarithmic=True), described="a & b")
    assert svg.count("<polyline") == 2
    assert svg.count("<circle") == 1
    points = re.findall(r"([\d.]+),([\d.]+)", " ".join(re.findall(r'points="([^"]+)"', svg)))
    assert len(points) == 4
    assert all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in points)
    assert "<a>" not in svg
    assert "a &amp; b" in svg
