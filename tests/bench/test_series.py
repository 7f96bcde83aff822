"""Samples of an engine's counters: the steps between them, and a series thin enough to draw."""

from typing import Any

from qkv_engine.bench.series import StatsSample, TimedStep, steps_of, thinned


def sample(seconds: float, steps: int = 0, **values: Any) -> StatsSample:
    known = dict.fromkeys(StatsSample._fields, 0) | {"blocks": {}, "running": 1}
    return StatsSample(**(known | {"seconds": seconds, "steps": steps} | values))


def rounded(steps: list[TimedStep]) -> list[TimedStep]:
    return [step._replace(ms=round(step.ms, 6)) for step in steps]


def test_a_step_lies_between_two_samples() -> None:
    samples = [
        sample(0.0, 0, running=0),
        sample(1.0, 1, prompt_tokens=64),  # began when nothing ran
        sample(1.010, 2, prompt_tokens=64),
        sample(1.010, 2, prompt_tokens=64),  # no step
        sample(1.030, 3, prompt_tokens=96, demotions=5),
        sample(1.040, 5, prompt_tokens=96, demotions=9),  # two at once
        sample(1.055, 6, prompt_tokens=96, demotions=9),
    ]
    assert rounded(steps_of(samples, runs_ahead=False)) == [
        TimedStep(10.0, 0, 0),
        TimedStep(20.0, 32, 5),
        TimedStep(15.0, 0, 0),
    ]


def test_ahead_of_results_a_demotion_belongs_to_the_step_launched_before() -> None:
    samples = [sample(0.0, 1), sample(0.010, 2, demotions=3), sample(0.030, 3, demotions=3, prompt_tokens=8)]
    samples.append(sample(0.035, 4, demotions=4, prompt_tokens=8))
    # The third interval has the results of the second launch, with its demotions and prompt tokens.
    assert rounded(steps_of(samples, runs_ahead=True)) == [TimedStep(20.0, 8, 3), TimedStep(5.0, 0, 0)]


def test_a_series_is_thin_and_keeps_its_ends() -> None:
    found = thinned([sample(5.0 + i / 128, i) for i in range(11)])  # 7.8 ms apart
    assert [(one.steps, one.seconds) for one in found] == [(i, i / 128) for i in (0, 3, 6, 9, 10)]
    assert thinned([sample(5.0)])[0].seconds == 0.0
