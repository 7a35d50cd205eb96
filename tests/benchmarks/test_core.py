"""The pure parts of the benchmark harness."""

import math
from pathlib import Path

import pytest

from benchmarks.core import cases, cli, kept, markdown, run
from benchmarks.core.judge import Target, judge
from benchmarks.core.model import Benchmark, Contender, Extra, Metric, Plan
from benchmarks.core.ranks import RankGroup, Spot
from benchmarks.core.stats import ratio_of_medians, summarise

STEP = Metric(name="step", unit="ms", meaning="a step", ratios=True)
PLAN = Plan(axes={"ranks": [1, 2]}, seconds_per_case=0, min_rounds=3, max_rounds=5)


class Scripted:
    """A session that answers from a table and remembers the order of questions."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def measure(self, contender: str) -> dict[str, float]:
        self.asked.append(contender)
        return {"step": {"mine": 9.0, "slow": 12.0, "fast": 10.0, "floor": 5.0}[contender]}

    def finish(self) -> Extra:
        return Extra()

    def close(self) -> None:
        """Nothing is open."""


def bench(**changes: object) -> Benchmark:
    roles = {"mine": "ours", "slow": "peer", "fast": "peer", "floor": "limit"}
    settings = {
        "name": "demo",
        "question": "How fast?",
        "contenders": [Contender(name=n, role=r, note="") for n, r in roles.items()],
        "metrics": [STEP],
        "open": lambda case, names, options: Scripted(),
        "quick": PLAN,
        "full": PLAN,
    }
    return Benchmark(**{**settings, **changes})


def result(ranks: int, **steps: list[float]) -> dict:
    return {
        "case": {"ranks": ranks},
        "status": "measured",
        "others": {"foreign": 0.0, "steal": 0.0},
        "samples": {name: {"step": values} for name, values in steps.items()},
    }


def test_every_combination_of_the_axes_is_a_case() -> None:
    found = cases.expand({"a": [1, 2], "b": "x", "c": (3, 4)}, keep=lambda case: case["a"] != 2)
    assert found == [{"a": 1, "b": "x", "c": 3}, {"a": 1, "b": "x", "c": 4}]


def test_filters_compare_as_text_and_join_values_of_one_axis() -> None:
    axes = {"ranks": [1, 2, 4], "link": ["a", "b"]}
    filters = cases.parse_filters(["ranks=1,4", "link=a"], axes)
    assert cases.select(cases.expand(axes), filters) == [
        {"ranks": 1, "link": "a"},
        {"ranks": 4, "link": "a"},
    ]
    with pytest.raises(SystemExit, match="axis of ranks, link"):
        cases.parse_filters(["rank=1"], axes)


def test_summary_has_median_and_spread() -> None:
    found = summarise(list(range(11)))
    assert (found.n, found.median, found.p10, found.p90) == (11, 5, 1, 9)
    assert math.isnan(summarise([]).median)


def test_ratio_interval_covers_noise_and_not_what_hit_both() -> None:
    drift = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    paired = ratio_of_medians([2 * value for value in drift], drift)
    assert (paired.low, paired.value, paired.high) == pytest.approx((2, 2, 2))
    noisy = ratio_of_medians([9, 10, 11, 10, 12], [10, 9, 11, 12, 10, 10])
    assert noisy.low < 1 < noisy.high


def test_rounds_begin_with_another_and_measure_all_alike() -> None:
    session, names = Scripted(), ["mine", "slow", "fast"]
    rounds = run.run_rounds(bench(), session, names, PLAN, lambda text: None)
    turns = [session.asked[at : at + 3] for at in range(0, 9, 3)]
    assert [turn[0] for turn in turns] == names
    assert [sorted(turn) for turn in turns] == [sorted(names)] * 3
    assert run.gather(rounds)["mine"]["step"] == [9.0] * 3


def test_nobody_always_comes_after_the_same() -> None:
    names = [f"c{n}" for n in range(6)]
    rounds = [run.mixed(names, turn) for turn in range(4)]
    before = {order[at - 1] for order in rounds if (at := order.index("c1"))}
    assert len(before) > 1
    assert run.mixed(names, 3) == rounds[3]


def test_target_is_judged_against_the_best_peer_in_every_case() -> None:
    target = Target(text="10 % faster", metric="step", at="most", bound=0.9)
    good = result(1, mine=[8.0] * 5, slow=[20.0] * 5, fast=[10.0] * 5)
    bad = result(2, mine=[9.5] * 5, slow=[20.0] * 5, fast=[10.0] * 5)
    assert judge(target, bench(), [good]).verdict == "met"
    verdict = judge(target, bench(), [good, bad])
    assert verdict.verdict == "missed"
    assert "worst 0.95 (ranks=2)" in verdict.detail
    assert "1 of 2" in verdict.detail


def test_target_may_name_those_it_compares_with() -> None:
    samples = result(1, mine=[9.0] * 5, slow=[20.0] * 5, fast=[10.0] * 5, floor=[6.0] * 5)
    half = Target(text="x", metric="step", at="most", bound=0.5, among=("slow",))
    assert judge(half, bench(), [samples]).figures == {"ranks=1": 0.45}
    near = Target(text="x", metric="step", at="most", bound=2, among=("floor",))
    assert judge(near, bench(), [samples]).figures == {"ranks=1": 1.5}
    gone = Target(text="x", metric="step", at="most", bound=2, among=("missing",))
    assert judge(gone, bench(), [samples]).verdict == "not judged"


def test_no_ratio_of_negative_numbers() -> None:
    nothing = ratio_of_medians([-3.0] * 5, [2.0] * 5)
    assert (nothing.low, nothing.value, nothing.high) == (0, 0, 0)
    assert math.isnan(ratio_of_medians([3.0] * 5, [-2.0] * 5).value)
    doubtful = ratio_of_medians([3.0] * 5, [-2.0, 1.0, 1.0, -1.0, 1.0])
    assert (doubtful.value, doubtful.high) == (3, math.inf)


def test_a_disturbed_run_is_not_recorded() -> None:
    quiet, loud = result(1, mine=[1.0]), result(2, mine=[1.0])
    loud["others"] = {"foreign": 0.3, "steal": 0.0}
    warnings = cli.disturbances([quiet, loud])
    assert warnings == ["ranks=2: other work took 30% of the cores, the hypervisor 0%"]
    assert cli.why_not_recorded({"warnings": []}, whole=True, asked=False) is None
    assert cli.why_not_recorded({"warnings": []}, whole=False, asked=True) is None
    assert "disturbed" in str(cli.why_not_recorded({"warnings": warnings}, whole=True, asked=True))
    assert "part" in str(cli.why_not_recorded({"warnings": []}, whole=False, asked=False))


def test_a_run_that_was_cut_off_goes_on_after_its_last_case(tmp_path: Path) -> None:
    file = tmp_path / "demo.unfinished"
    first = kept.Kept(file, resume=False)
    first.add(result(1, mine=[9.0]))
    first.add({"case": {"ranks": 2}, "status": "failed", "reason": "cut off"})
    with file.open("a") as cut:
        cut.write('{"case": {"ranks": 4}, "sam')
    again = kept.Kept(file, resume=True)
    assert again.find({"ranks": 1}) == result(1, mine=[9.0])
    assert again.find({"ranks": 2}) is None
    again.add(result(2, mine=[8.0]))
    assert kept.Kept(file, resume=True).find({"ranks": 2}) == result(2, mine=[8.0])
    assert kept.Kept(file, resume=False).find({"ranks": 1}) is None


def test_only_cases_that_are_not_there_are_measured(tmp_path: Path) -> None:
    opened: list[object] = []

    def session(case: cases.Case, names: object, options: object) -> Scripted:
        opened.append(case["ranks"])
        return Scripted()

    benchmark = bench(open=session)
    file = kept.Kept(tmp_path / "demo.unfinished", resume=False)
    file.add(result(1, mine=[9.0], slow=[12.0], fast=[10.0], floor=[5.0]))
    file = kept.Kept(tmp_path / "demo.unfinished", resume=True)
    names = ["mine", "slow", "fast", "floor"]
    chosen = cases.expand(PLAN.axes)
    done = cli.run_all(benchmark, PLAN, chosen, names, "full", file)
    assert opened == [2]
    assert [one["case"]["ranks"] for one in done["cases"]] == [1, 2]
    assert not (tmp_path / "demo.unfinished").exists()


def test_ranks_know_who_shares_their_machine() -> None:
    spots = [Spot(address=f"10.0.0.{n}", interface="eth0") for n in (1, 1, 2)]
    places = [RankGroup.place_of(rank, spots) for rank in range(3)]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "0"]
    assert [place["LOCAL_WORLD_SIZE"] for place in places] == ["2", "2", "1"]
    assert RankGroup.environment(spots, "m")["MASTER_ADDR"] == "10.0.0.1"


def test_no_ratio_to_a_peer_that_noise_made_negative() -> None:
    target = Target(text="x", metric="step", at="most", bound=0.5)
    verdict = judge(target, bench(), [result(1, mine=[3.0] * 5, fast=[-1.0] * 5)])
    assert verdict.verdict == "not judged"


def test_target_in_doubt_holds_until_the_interval_says_otherwise() -> None:
    noisy = result(1, mine=[9.0, 10.0, 11.0, 12.0, 13.0], fast=[10.0] * 5)
    worse = result(1, mine=[11.0, 12.0, 11.0, 12.0, 13.0], fast=[10.0] * 5)
    strict = Target(text="x", metric="step", at="most", bound=1)
    lenient = Target(text="x", metric="step", at="most", bound=1, doubt=True)
    assert judge(strict, bench(), [noisy]).verdict == "missed"
    assert judge(lenient, bench(), [noisy]).verdict == "met"
    assert judge(lenient, bench(), [worse]).verdict == "missed"


def test_target_may_be_about_another_of_ours() -> None:
    samples = result(1, mine=[9.0] * 5, variant=[8.0] * 5, fast=[10.0] * 5)
    target = Target(text="x", metric="step", at="most", bound=1, contender="variant")
    assert judge(target, bench(), [samples]).figures == {"ranks=1": 0.8}


def test_target_without_figures_is_not_judged() -> None:
    target = Target(text="x", metric="step", at="most", bound=1, where=lambda case: False)
    assert judge(target, bench(), [result(1, mine=[1.0])]).verdict == "not judged"
    left_out = {"case": {"ranks": 1}, "status": "not run", "reason": "no root"}
    target = Target(text="x", metric="step", at="most", bound=1)
    assert judge(target, bench(), [left_out]).verdict == "not judged"


def test_target_on_ours_alone_and_doubt() -> None:
    target = Target(text="x", metric="step", at="least", bound=3, of="ours")
    verdict = judge(target, bench(), [result(1, mine=[1.0, 2.0, 4.0, 5.0, 6.0])])
    assert verdict.verdict == "met"
    assert "inside the interval of 1" in verdict.detail


def test_only_the_own_section_is_replaced() -> None:
    page = markdown.replace_section("", "one", "first")
    page = markdown.replace_section(page, "two", "second")
    page = markdown.replace_section(page + "\nby hand\n", "one", "third")
    assert "first" not in page
    assert page.index("third") < page.index("second") < page.index("by hand")
    assert page.count("<!-- begin one -->") == page.count("<!-- end one -->") == 1
    with pytest.raises(SystemExit, match="has no"):
        markdown.replace_section("<!-- begin one -->", "one", "x")


def test_report_names_cases_that_did_not_run() -> None:
    left_out = {"case": {"ranks": 2}, "status": "not run", "reason": "no root"}
    record = {
        "mode": "quick",
        "date": "2000-01-01",
        "seconds": 1.0,
        "machine": {"cores": 2},
        "load_before": [0.0],
        "load_after": [0.0],
        "warnings": [],
        "contenders": ["mine", "fast", "floor"],
        "cases": [
            result(1, mine=[8.0], fast=[10.0], floor=[4.0]),
            {**left_out, "others": {"foreign": 0.0, "steal": 0.0}},
        ],
        "targets": [],
    }
    text = markdown.render(bench(), record)
    assert "**not run**: ranks=2: no root" in text
    assert "**0.800 [0.800, 0.800]** (fast)" in text
    assert "2.000 [2.000, 2.000]" in text
