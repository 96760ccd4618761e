"""Pictures of a step: groups of kernels, the middle step, and the times in which nothing runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import plots, timeline
from benchmarks.timeline import Event


def steps(num_steps, length):
    """Returns steps of one device with two streams: 3 of 10 parts of a step nothing runs."""
    first, second = [], []
    for step in range(num_steps):
        at = 5.0 + step * length
        first += [Event(at, at + 0.2 * length, "void jaxsok::(anonymous namespace)::PlanClaimKernel(int)")]
        first += [Event(at + 0.4 * length, at + 0.9 * length, "nvjet_sm90_tst")]
        second += [Event(at + 0.1 * length, at + 0.3 * length, "void jaxsok::SumUsesKernel<4, 2>(float)")]
        first += [Event(at + length - 1e-9, at + length, "loop_add_fusion")]
    return {"Stream #1(Compute)": first, "Stream #2(Compute)": second}


def test_the_middle_step_has_its_gaps():
    streams = steps(5, 10.0)
    begin, end = timeline.step_of({"GPU:0": streams}, 5)
    assert (begin, end) == pytest.approx((29.0, 39.0))  # a step begins with its longest kernel
    assert timeline.step_of({"GPU:0": streams}, 5, 0) == pytest.approx((9.0, 19.0))
    with pytest.raises(ValueError, match="step: got 4, wanted 0 to 3"):
        timeline.step_of({"GPU:0": streams}, 5, 4)
    step = timeline.cut(streams, begin, end)
    is_busy = np.zeros(1000, bool)
    for events in step.values():
        for event in events:
            is_busy[round(event.begin * 100) : round(event.end * 100)] = True
    gaps = [gap for gap in timeline.gaps_of(step, 10.0) if gap.end - gap.begin > 1e-3]
    assert sum(gap.end - gap.begin for gap in gaps) == pytest.approx((~is_busy).sum() / 100)
    assert [gap.name for gap in gaps] == ["nvjet_sm90_tst … loop_add_fusion", "SumUsesKernel … the step's end"]
    text = timeline.describe("GPU:0", step, 10.0)
    assert (
        "nothing runs for 2.00 ms" in text and "matrix products: 5.00 ms" in text and "gap at 5.00 ms, 1.000 ms" in text
    )


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void jaxsok::(anonymous namespace)::PlanClaimKernel(int)", "plan"),
        ("jaxsok::(anonymous namespace)::BarrierKernel(jaxsok::WindowMember, uint32_t)", "waiting for other devices"),
        ("void jaxsok::SumUsesKernel<4, 2>(float)", "tables"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "sums over devices (NCCL)"),
        ("gemm_fusion_dot_15", "matrix products"),
        ("MemcpyD2D", "copies"),
        ("loop_concatenate_fusion_1", timeline.OTHERS),
    ],
)
def test_kernels_belong_to_groups(name, group):
    assert Event(0, 1, name).group == group


@pytest.mark.skipif(plots.why_none() is not None, reason="matplotlib is not installed")
def test_a_step_is_drawn(tmp_path):
    timeline.draw({"GPU:0": steps(1, 2.0), "GPU:1": steps(1, 2.0)}, 2.0, tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert text.count("other streams") == 2 and "GPU:1" in text and "matrix products" in text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the profile of a GPU has kernels")
def test_a_profile_without_a_gpu_is_refused(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        jnp.arange(10).block_until_ready()
    with pytest.raises(ValueError, match="wanted a profile of a GPU"):
        timeline.main([str(tmp_path), "--steps", "1"])
    (tmp_path / "another.xplane.pb").write_bytes(b"")
    with pytest.raises(ValueError, match=r"wanted one xplane.pb file in it.*another"):
        timeline.main([str(tmp_path), "--steps", "1"])
