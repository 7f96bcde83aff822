"""The parts of a step: clocks that nest, kernels by name, and a real step of a tiny model on the CPU."""

import json

import pytest

from studies.profile_step import Clocks, Interval, covered, main, part_of


class Made:
    """An object whose calls take exact times on a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def outer(self) -> str:
        self.now += 1.0
        self.inner()
        self.now += 2.0
        return "done"

    def inner(self) -> None:
        self.now += 5.0

    def fail(self) -> None:
        self.now += 3.0
        raise ValueError("inside")


def test_a_part_inside_another_takes_its_time_from_it() -> None:
    made = Made()
    clocks = Clocks(made.clock)
    with clocks.around(made, "outer", "outer"), clocks.around(made, "inner", "inner"):
        assert made.outer() == "done"
        made.now += 100.0  # between the parts
        made.inner()
    assert dict(clocks.seconds) == {"outer": 3.0, "inner": 10.0}
    made.outer()
    assert clocks.seconds["outer"] == 3.0 and "outer" not in vars(made)


def test_an_error_leaves_nothing_behind() -> None:
    made = Made()
    clocks = Clocks(made.clock)
    fail = Made.fail
    with clocks.around(Made, "fail", "fail"):
        with pytest.raises(ValueError, match="inside"):
            made.fail()
        made.now += 7.0
    assert dict(clocks.seconds) == {"fail": 3.0} and Made.fail is fail


def test_kernels_by_name() -> None:
    found = {
        "decode_int_kernel": "attention, codes",
        "rope_kv_write_kernel": "q/k norm, rope, KV write",
        "linear_tile_kernel": "linear",
        "nvjet_tst_64x8_64x16_2x1_v_bz_TNT": "linear",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16>": "linear",
        "cublasLt::splitKreduce_kernel<32>": "linear",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "void at::native::vectorized_elementwise_kernel<direct_copy_kernel_cuda>": "copies",
        "copy_kernel": "sampling",
        "void at::native::reduce_kernel<512, 1, ArgMaxOps<float>>": "sampling",
        "something new": "other",
    }
    assert {name: part_of(name) for name in found} == found


def test_time_in_which_anything_ran_counts_once() -> None:
    assert covered([Interval(5, 7), Interval(0, 2), Interval(1, 3), Interval(1, 2)]) == 5
    assert covered([]) == 0


def test_a_step_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shape", "demo", "--device", "cpu", "--memory", "48MiB", "--context", "300", "--steps", "2"]
    assert main([*words, "--batch", "1,2", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    parts = {(row["batch"], row["side"], row["part"]): row["us"] for row in rows}
    for batch in (1, 2):
        host = {part: us for (b, side, part), us in parts.items() if (b, side) == (batch, "host")}
        assert host["all but waiting"] == pytest.approx(sum(host.values()) / 2, rel=0.5)
        assert {"schedule", "plan and launch", "accept and report", "seal and demote"} <= set(host)
        assert parts[batch, "step", "all"] > 0 and parts[batch, "operators", "aten::embedding"] > 0


@pytest.mark.parametrize("words", [["--batch", "9999"], ["--kv", "int5"], ["--batch", "all"]])
def test_mistakes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--shape", "demo", "--device", "cpu", "--memory", "48MiB", "--context", "300", "--steps", "2"]
    assert main([*rest, *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
